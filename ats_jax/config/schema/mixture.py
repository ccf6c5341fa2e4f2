"""Named sources: in which ratio their rows are mixed, in phases that follow each other."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from ats_jax.config.schema.finetune import check_layers
from ats_jax.config.schema.optimizer import check_roles
from ats_jax.config.schema.setting import Table, setting

MOST_PARTS = 100_000  # rows after which a mixture repeats: a table of so many is held in memory
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_LENGTHS = ("steps", "tokens", "epochs")


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of a run in which rows are drawn from sources in one ratio."""

  weights: Table[float] = setting(
    Table(), "how many rows of each source, in this ratio; of one that is not named none", low=0.0
  )
  steps: int = setting(0, "length; the last phase needs none", unit="steps", low=0)
  tokens: int = setting(0, "length, in place of steps", unit="tokens", low=0)
  epochs: float = setting(
    0.0, "length, in place of steps: passes over the rows of its sources", low=0.0
  )
  learning_rate: float = setting(
    0.0,
    "peak of a schedule of its own over its length, in place of optimizer.learning_rate; 0 in all "
    "phases = one schedule over the run",
    low=0.0,
  )
  warmup_steps: int = setting(0, "warm-up of that schedule", unit="steps", low=0)
  trains: tuple[str, ...] = setting(
    (), "roles of parameters whose weights move, e.g. adapter,adapter_out,head; () = all that train"
  )
  layers: str = setting(
    "",
    "the layers whose weights move, from 0, e.g. 16-31; '' = all. What belongs to no layer goes by "
    "trains alone",
  )

  @property
  def is_endless(self) -> bool:
    """Whether it has no length of its own, and ends with the run."""
    return not any(getattr(self, unit) for unit in _LENGTHS)


def phases_of(data: Any) -> tuple[Phase, ...]:
  """The phases of a section `data`; () = weights follow the sizes of its sources."""
  return data.phases or ((Phase(data.mixture),) if data.mixture else ())


def has_rates(data: Any) -> bool:
  """Whether each phase has a learning rate of its own."""
  return any(phase.learning_rate for phase in data.phases)


def freezes(data: Any) -> bool:
  """Whether a phase trains some roles or layers alone."""
  return any(phase.trains or phase.layers for phase in data.phases)


def steps_of(phase: Phase, batch_size: int, seq_len: int, rows: int) -> int:
  """How many steps a phase has, rounded up; 0 = to the end of the run.

  Args:
    phase: whose length is read.
    batch_size: rows of a step.
    seq_len: tokens of a row.
    rows: of an epoch of its sources.
  """
  if phase.steps:
    return phase.steps
  length = Fraction(phase.tokens, seq_len) + _fraction(phase.epochs) * rows
  return math.ceil(length / batch_size)


def parts(weights: Mapping[str, float], names: Iterable[str]) -> dict[str, int]:
  """Of the positive weights the whole numbers in their ratio, in the order of `names`.

  Raises:
    ValueError: as `whole_parts`.
  """
  return whole_parts({n: _fraction(weights[n]) for n in names if weights.get(n)})


def whole_parts(weights: Mapping[str, Fraction]) -> dict[str, int]:
  """Positive weights as whole numbers without a common divisor, in the same ratio.

  Raises:
    ValueError: if they add up to more than MOST_PARTS.
  """
  scale = math.lcm(*(weight.denominator for weight in weights.values()))
  scaled = {name: int(weight * scale) for name, weight in weights.items()}
  divisor = math.gcd(*scaled.values())
  whole = {name: number // divisor for name, number in scaled.items()}
  if sum(whole.values()) > MOST_PARTS:
    rounded = {n: max(1, round(1000 * w / sum(weights.values()))) for n, w in weights.items()}
    fewer = ",".join(f"{name}={number}" for name, number in rounded.items())
    raise ValueError(
      f"the smallest whole numbers in this ratio add up to {sum(whole.values()):,}, and at most "
      f"{MOST_PARTS:,} are kept. Round the weights, e.g. {fewer}."
    )
  return whole


def _fraction(number: float) -> Fraction:
  """The number that its decimal digits say: 1/10 for 0.1."""
  return Fraction(str(number))


def check_sources(data: Any) -> None:
  """Refuse names of sources that cannot be part of a metric's name, and paths beside them."""
  for setting_name in ("sources", "validation_sets"):
    for name, paths in getattr(data, setting_name).items():
      if not _NAME.fullmatch(name):
        raise ValueError(
          f"data.{setting_name}: {name!r} is no name. Use small letters, digits, '_' and '-', and "
          "begin with a letter."
        )
      if not paths:
        raise ValueError(f"data.{setting_name}: {name} has no path. Give it one, or leave it out.")
  if data.paths and data.sources:
    raise ValueError(
      "data.paths and data.sources are both set. Give all text a name in data.sources, or none."
    )


def check_mixture(cfg: Any) -> None:
  """Refuse weights and lengths of phases that cannot be, or that contradict other settings."""
  data = cfg.data
  if data.temperature <= 0.0:
    raise ValueError(
      f"data.temperature={data.temperature:g} is not positive. Use 1 for shares by size, more to "
      "raise those of small sources."
    )
  if data.mixture and data.phases:
    raise ValueError(
      "data.mixture and data.phases both give weights. Leave one of them out: data.mixture is for "
      "one ratio throughout."
    )
  phases = phases_of(data)
  if phases and data.temperature != 1.0:
    raise ValueError(
      f"data.temperature={data.temperature:g} does nothing with data.mixture or data.phases, which "
      "give the weights. Leave one of them out."
    )
  for number, phase in enumerate(phases):
    where = f"data.phases[{number}]" if data.phases else "data.mixture"
    _check_weights(where, phase.weights, data.sources)
    if sum(bool(getattr(phase, unit)) for unit in _LENGTHS) > 1:
      raise ValueError(f"{where} has several lengths. Give one of {', '.join(_LENGTHS)}.")
    if phase.is_endless and number < len(phases) - 1:
      raise ValueError(
        f"{where} has no length, but another phase follows it. Say how long it is, in one of "
        f"{', '.join(_LENGTHS)}."
      )
  has_end = bool(phases) and not phases[-1].is_endless
  if has_end and cfg.length != "phases":
    raise ValueError(
      "data.phases: the last one has a length, but the end of the run is elsewhere. Leave that "
      "length out, or set length=phases, which ends the run there."
    )
  if cfg.length == "phases" and not has_end:
    raise ValueError(
      "length=phases, but there is no last phase in data.phases that says how long it is. Give it "
      "a length, or use length=given and num_steps."
    )


def _check_weights(where: str, weights: Mapping[str, float], sources: Mapping[str, Any]) -> None:
  for name in weights:
    if name not in sources:
      raise ValueError(
        f"{where}: there is no source {name!r}. Those of data.sources are {', '.join(sources)}."
      )
  if not sum(weights.values()):
    raise ValueError(f"{where}: the weights sum to 0. Give a source a positive one.")
  try:
    parts(weights, sources)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e


def check_rates(cfg: Any) -> None:
  """Refuse rates, roles or moments by phases that there are not."""
  data = cfg.data
  given, resets = has_rates(data), cfg.optimizer.phase_moments == "reset"
  if resets and len(data.phases) < 2:
    raise ValueError(
      "optimizer.phase_moments=reset, but data.phases has no second phase. Add one, or leave "
      "optimizer.phase_moments at keep."
    )
  for number, phase in enumerate(data.phases):
    check_roles(f"data.phases[{number}].trains", phase.trains)
    check_layers(f"data.phases[{number}].layers", phase.layers, cfg.model.num_layers)
    if given and not phase.learning_rate:
      raise ValueError(
        f"data.phases[{number}] has no learning_rate, and others have. Give one to each or to none."
      )
    if phase.warmup_steps and not given:
      raise ValueError(
        f"data.phases[{number}].warmup_steps={phase.warmup_steps} does nothing without "
        "learning_rate. Give each phase one, or use optimizer.warmup_steps."
      )
    steps = steps_of(phase, data.batch_size, data.seq_len, 0)
    is_known = number < len(data.phases) - 1 and not phase.epochs
    if is_known and phase.warmup_steps > steps:
      raise ValueError(
        f"data.phases[{number}]: {phase.warmup_steps} steps of warm-up exceed a phase of {steps} "
        "steps. Shorten the warm-up, or lengthen the phase."
      )
