"""Settings of a fine-tuning, chosen by its model, its conversations and the memory of a device."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ats_jax.config.build import from_config_dict
from ats_jax.config.schema import Config
from ats_jax.config.schema.finetune import LoRA
from ats_jax.config.schema.orchestrator import PROBE_POSITIONS
from ats_jax.config.text import text_of
from ats_jax.config.tree import updated
from ats_jax.metrics.memory import GIB
from ats_jax.planner.describe import planned_bytes
from ats_jax.planner.fit import fit
from ats_jax.planner.hardware import Hardware

RANK = 16
CONVERSATIONS = 32  # of an update
EPOCHS = 3
LEAST_UPDATES = 100  # with fewer, an update has fewer conversations
LOOKS = 10  # evaluations of a run
PATIENCE = 3  # of them without a lower loss
USUAL_ROW = 2048  # of short conversations, which are packed
MICRO_TOKENS = 8192  # of a micro-batch where the memory is not known
FREE_SHARE = 0.06  # of a device's memory that a plan leaves


class Texts(NamedTuple):
  """The conversations of a training.

  Attributes:
    number: how many there are.
    tokens: of all.
    longest: tokens of the longest.
  """

  number: int
  tokens: int
  longest: int

  @property
  def mean(self) -> float:
    """Tokens of a conversation."""
    return self.tokens / max(1, self.number)


class Choice(NamedTuple):
  """Settings and why they are these.

  Attributes:
    settings: what was chosen, by dotted name.
    given: what the user had said already, of those that would have been chosen.
    why: in words.
  """

  settings: Mapping[str, Any]
  given: tuple[str, ...]
  why: str

  def in_words(self) -> str:
    """Of the log."""
    chosen = [f"{name}={text_of(value)}" for name, value in self.settings.items()]
    return ", ".join([*chosen, *(f"{name} as given" for name in self.given)]) + f": {self.why}"


@dataclasses.dataclass
class Chooser:
  """Nested values of a config, which each method completes; what is given stays.

  Attributes:
    nested: the values.
    given: the settings that the user gave, by dotted name.
    choices: what was chosen so far.
  """

  nested: dict[str, Any]
  given: frozenset[str]
  choices: list[Choice] = dataclasses.field(default_factory=list)

  @property
  def cfg(self) -> Config:
    """The config of the values.

    Raises:
      ValueError: as `from_config_dict`.
    """
    return from_config_dict(self.nested)

  def choose(self, why: str, values: Mapping[str, Any]) -> None:
    """Set what is not given."""
    is_given = lambda name: name in self.given or name.removesuffix(".name") in self.given
    chosen = {name: value for name, value in values.items() if not is_given(name)}
    self.nested = updated(self.nested, chosen)
    self.choices.append(Choice(chosen, tuple(n for n in values if n not in chosen), why))

  def of_model(self) -> None:
    """What trains, and at which rate."""
    if not self.cfg.finetune.freeze:
      self.choose("adapters train in little memory", {"finetune.adapter.name": "lora"})
    cfg = self.cfg
    rate = min(1e-3, max(1e-4, 2e-4 * math.sqrt(4096 / cfg.model.d_model)))
    if isinstance(cfg.finetune.adapter, LoRA):
      rank = min(RANK, 2 ** int(math.log2(max(1, _narrowest(cfg) // 2))))
      self.choose(
        f"rank {RANK}, or half of the narrowest matrix; adapters are scaled by 2",
        {"finetune.adapter.rank": rank, "finetune.adapter.alpha": 2.0 * rank},
      )
      why = f"usual for adapters of a model {cfg.model.d_model} wide"
    else:
      rate, why = rate / 10, "the weights themselves take a tenth of the rate of adapters"
    self.choose(why, {"optimizer.learning_rate": float(f"{rate:.1g}")})
    self.choose(
      "a short training rises and falls once, and does not decay towards 0",
      {
        "optimizer.schedule.name": "cosine",
        "optimizer.warmup_fraction": 0.05,
        "optimizer.weight_decay": 0.0,
      },
    )

  def of_texts(self, texts: Texts, most: int, devices: int) -> None:
    """Rows and updates.

    Args:
      texts: the conversations.
      most: positions of the model; 0 = any number.
      devices: number of devices.
    """
    wanted = max(texts.longest + 1, min(USUAL_ROW, round(4 * texts.mean)), 64)
    seq_len = 2 ** math.ceil(math.log2(wanted))
    if most and seq_len > most:
      seq_len, why = most, f"the model has {most:,} positions; longer conversations are left out"
    else:
      why = f"a power of two that holds the longest conversation of {texts.longest:,} tokens"
    self.choose(f"{why}, and of short ones several", {"data.seq_len": seq_len})
    seq_len = self.cfg.data.seq_len
    rows, epochs = texts.tokens / seq_len, EPOCHS
    batch = max(1, round(CONVERSATIONS * texts.mean / seq_len))
    while batch > 1 and epochs * rows / batch < LEAST_UPDATES:
      batch //= 2
    batch = math.ceil(batch / devices) * devices
    self.choose(
      f"about {batch * seq_len / max(1.0, texts.mean):,.0f} conversations of {texts.mean:,.0f} "
      "tokens an update",
      {"data.batch_size": batch},
    )

  def of_length(self, num_rows: int) -> None:
    """The number of updates, and when to look.

    Args:
      num_rows: of an epoch.
    """
    cfg = self.cfg
    if not {"num_steps", "num_epochs", "length"} & self.given:
      steps = max(LOOKS, math.ceil(EPOCHS * num_rows / cfg.data.batch_size))
      why = f"{EPOCHS} passes over {num_rows:,} rows"
      self.choose(f"{why}, {LOOKS} updates at least", {"num_steps": steps})
    steps = self.cfg.num_steps
    if cfg.counts_epochs:
      steps = math.ceil((cfg.num_epochs or 1) * num_rows / cfg.data.batch_size)
    every = max(1, steps // LOOKS)
    looks = {"eval.every_steps": every, "checkpoint.every_steps": every}
    if not (cfg.data.validation_fraction or cfg.data.validation_paths):
      self.choose("nothing is held out", {"checkpoint.every_steps": every})
      return
    self.choose(f"{LOOKS} evaluations; the best is kept", looks | {"checkpoint.keep_best": True})
    if cfg.data.seq_len > PROBE_POSITIONS and PROBE_POSITIONS % self.cfg.mesh.context:
      return
    self.choose(
      f"the run ends after {PATIENCE} evaluations without a lower loss",
      {
        "orchestrator.mode": "act",
        "orchestrator.check_interval": min(every, 100),
        "orchestrator.patience": PATIENCE,
      },
    )

  def of_memory(self, limit: int, devices: int, hardware: Hardware | None) -> None:
    """Mesh, recomputation and micro-batches.

    Args:
      limit: bytes of a device; 0 = unknown.
      devices: number of devices.
      hardware: rates of devices and links; None = unknown.

    Raises:
      ValueError: if nothing fits.
    """
    cfg = self.cfg
    if not (limit and hardware):
      batch, most = cfg.data.batch_size, max(1, MICRO_TOKENS // cfg.data.seq_len) * devices
      accum = next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= most)
      why = "the memory of the device is not known; micro-batches of few tokens need little"
      self.choose(why, {"step.accum_steps": accum})
      return
    of_plan = round((1 - FREE_SHARE) * limit)
    found, base = fit(cfg, devices, of_plan, hardware), "finetune.adapter.base"
    if found.pick is None and isinstance(cfg.finetune.adapter, LoRA) and base not in self.given:
      self.choose("the weights fit as codes of 4 bits alone", {base: "nf4"})
      found = fit(self.cfg, devices, of_plan, hardware)
    if found.pick is None:
      least = planned_bytes(found.plan) / GIB
      raise ValueError(
        f"this fine-tuning does not fit {devices} x {limit / GIB:.1f} GiB: rows of "
        f"data.seq_len={cfg.data.seq_len} need {least:.1f} GiB with all recomputed. Use "
        "shorter rows, or a smaller model; `ats-jax plan` has the parts."
      )
    why = f"the fastest that fits {limit / GIB:.1f} GiB by the planner"
    self.choose(f"{why}: {planned_bytes(found.plan) / GIB:.1f} GiB", found.pick.settings)


def _narrowest(cfg: Config) -> int:
  """The least dimension of the matrices that get adapters by default."""
  m, moe = cfg.model, cfg.moe
  wide = [m.d_model, m.num_kv_heads * m.head_width, m.d_ff, moe.num_experts and moe.d_ff]
  return min(n for n in wide if n)
