"""The section `optimizer.schedule`: the learning rate after warm-up, as a share of its peak."""

import dataclasses

from ats_jax.config.schema.setting import Kinds, setting
from ats_jax.extensions import schedules

SCHEDULES = Kinds("optimizer.schedule", "shape after warm-up", registry=schedules)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A schedule without settings: `constant`, and what an extension registers without any."""

  name: str = SCHEDULES.tag("constant")


@SCHEDULES.of_part("ats_jax.step.schedule:constant")
@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
  """The peak to the end."""


@dataclasses.dataclass(frozen=True)
class Falling(Schedule):
  """A schedule that ends below its peak."""

  final_fraction: float = setting(
    0.1, "learning rate at the end as a share of the peak", low=0.0, high=1.0
  )


@SCHEDULES.of_part("ats_jax.step.schedule:linear")
@dataclasses.dataclass(frozen=True)
class Linear(Falling):
  """A straight line from the peak to the end of the run."""

  name: str = SCHEDULES.tag("linear")


@SCHEDULES.of_part("ats_jax.step.schedule:cosine")
@dataclasses.dataclass(frozen=True)
class Cosine(Falling):
  """Half a period of a cosine from the peak to the end of the run."""

  name: str = SCHEDULES.tag("cosine")


@SCHEDULES.of_part("ats_jax.step.schedule:cosine")
@dataclasses.dataclass(frozen=True)
class OneCycle(Falling):
  """A cosine, with a warm-up of 30 % of the run where none is given (Smith & Topin 2018)."""

  name: str = SCHEDULES.tag("one_cycle")


@SCHEDULES.of_part("ats_jax.step.schedule:rex")
@dataclasses.dataclass(frozen=True)
class Rex(Falling):
  """Reflected exponential (Chen et al. 2021, arXiv:2107.04197)."""

  name: str = SCHEDULES.tag("rex")


@SCHEDULES.of_part("ats_jax.step.schedule:warmup_stable_decay")
@dataclasses.dataclass(frozen=True)
class WarmupStableDecay(Falling):
  """The peak, then a straight line down (Hu et al. 2024, arXiv:2404.06395)."""

  name: str = SCHEDULES.tag("wsd")
  decay_fraction: float = setting(0.2, "share of num_steps spent in the decay", low=0.0, high=1.0)
