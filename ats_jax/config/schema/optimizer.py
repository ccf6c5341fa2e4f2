"""The section `optimizer`."""

import dataclasses
import math
from typing import Any

from ats_jax.config.schema import rules
from ats_jax.config.schema.schedule import SCHEDULES, Schedule
from ats_jax.config.schema.setting import Condition, Kinds, of_flags, section, setting, when
from ats_jax.extensions import optimizers

OPTIMIZERS = Kinds("optimizer", "what makes directions of gradients", registry=optimizers)
_ONE_SCHEDULE = Condition(
  "data.phases",
  "phases without a learning rate of their own",
  lambda phases: not any(phase["learning_rate"] for phase in phases),
)


def check_averages(optimizer: "OptimizerConfig", *names: str) -> None:
  """Refuse a decay of 1 of an average of gradients: a rule for `check` of any optimizer."""
  for name in names:
    if getattr(optimizer, name) == 1.0:
      raise ValueError(f"optimizer.{name}=1 never takes a gradient in. Use less than 1.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """What every optimizer has: a schedule of its rate, weight decay, a limit of gradients."""

  name: str = OPTIMIZERS.tag("adamw")
  learning_rate: float = setting(3e-4, "peak learning rate", low=0.0, needs=of_flags(_ONE_SCHEDULE))
  schedule: Schedule = section(SCHEDULES, "cosine")
  warmup_steps: int = setting(
    0,
    "linear warm-up; the first step uses lr/warmup_steps",
    low=0,
    needs=of_flags(_ONE_SCHEDULE),
  )
  warmup_fraction: float = setting(
    0.0,
    "warm-up as a share of num_steps; warmup_steps, if set, goes before it",
    low=0.0,
    high=1.0,
    needs=[of_flags(when("optimizer.warmup_steps", 0)), of_flags(_ONE_SCHEDULE)],
  )
  phase_moments: str = setting(
    "keep",
    "the optimizer's moments and count of updates where one of data.phases begins: 'keep' "
    "them, or 'reset' them to those of a new run",
    choices=("keep", "reset"),
    resume="free",
    needs=when("data.phases"),
  )
  weight_decay: float = setting(
    0.1, "decoupled decay of matrices; norms, biases and scalars are never decayed", low=0.0
  )
  decay_embeddings: bool = setting(
    False, "decay the embedding table too", needs=of_flags(when("optimizer.weight_decay"))
  )
  grad_clip: float = setting(1.0, "global-norm clip; 0 = off", low=0.0)
  ema_decay: float = setting(
    0.0,
    "decay of an average of the weights, used by evaluation and generation; 0 = none",
    low=0.0,
    high=1.0,
  )

  def check_length(self, cfg: Any) -> None:
    """Refuse a warm-up that does not end, and an average of weights that stays at the first."""
    if self.ema_decay == 1.0:
      raise ValueError("optimizer.ema_decay=1 keeps the first weights for ever. Use less than 1.")
    advice = (
      ". Shorten the warm-up, train longer, or use optimizer.warmup_fraction, a share of the run, "
      "with warmup_steps=0."
    )
    rules.at_most(cfg, "optimizer.warmup_steps", "num_steps", advice)

  def formats(self) -> dict[str, str]:
    """The dtype of each array that is kept beside a parameter, by its name in the state."""
    return {}

  def for_larger_batches(self, by: int) -> dict[str, Any] | None:
    """Settings that train on batches `by` times as large as these do; None = no rule is known."""
    del by
    return None


@OPTIMIZERS.of_part("ats_jax.step.optimizers.adamw:adamw")
@dataclasses.dataclass(frozen=True)
class AdamW(OptimizerConfig):
  """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

  b1: float = setting(0.9, "decay of Adam's first moment", low=0.0, high=1.0)
  b2: float = setting(0.95, "decay of Adam's second moment", low=0.0, high=1.0)
  eps: float = setting(1e-8, "added to the root of the second moment", low=0.0)
  mu_dtype: str = setting("float32", "format of the first moment", choices=("float32", "bfloat16"))
  nu_dtype: str = setting("float32", "format of the second moment", choices=("float32", "bfloat16"))

  def check(self, cfg: Any) -> None:
    """Refuse what never takes a gradient in, or divides 0 by 0."""
    del cfg
    check_averages(self, "b1", "b2")
    if self.eps == 0.0:
      raise ValueError(
        "optimizer.eps=0 divides 0 by 0 where a gradient is 0, as for tokens not seen yet. "
        "Use a small positive number, e.g. 1e-8."
      )

  def formats(self) -> dict[str, str]:
    """The dtypes of the two moments."""
    return {"mu": self.mu_dtype, "nu": self.nu_dtype}

  def for_larger_batches(self, by: int) -> dict[str, Any]:
    """The rate times sqrt(by) (Malladi et al. 2022, arXiv:2205.10287); times in tokens stay.

    Those are the half-life of the second moment (Marek et al. 2025, arXiv:2507.07101) and the time
    scale of the decay, batch / (rate * decay) (Wang & Aitchison 2024, arXiv:2405.13698).
    """
    return {
      "learning_rate": math.sqrt(by) * self.learning_rate,
      "b2": self.b2**by,
      "weight_decay": math.sqrt(by) * self.weight_decay,
    }
