"""Scalars that the compiled step reads: setting one needs no new program."""

import dataclasses
from typing import ClassVar, Self

import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.base import Action, Memory, Now
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Scalar(Action, abstract=True):
  """Sets a scalar of `Control` to its first field; the second, `before`, is the old value.

  Attributes:
    scalar: name of the scalar in `Control`.
    called: the same in words.
    least: value.
    most: value.
  """

  scalar: ClassVar[str]
  called: ClassVar[str]
  least: ClassVar[float]
  most: ClassVar[float]

  @property
  def value(self) -> float:
    """What it is set to."""
    value, _ = dataclasses.astuple(self)
    return value

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range."""
    if not self.least <= self.value <= self.most:
      allowed = f"[{self.least:g}, {self.most:g}]"
      raise ValueError(f"{self.called} is {self.value}; it must be in {allowed}.")
    super().check(cfg, step)

  def fill(self, now: Now) -> Self:
    """Take the old value from the policy."""
    _, before = dataclasses.astuple(self)
    return dataclasses.replace(self, **{"before": now.policy.control.get(self.scalar, before)})

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Write it for the compiled step to read."""
    assert state.control is not None, "the run has no reflex"
    array = jnp.full_like(getattr(state.control, self.scalar), self.value)
    return dataclasses.replace(state, control=state.control._replace(**{self.scalar: array}))

  def remember[M: Memory](self, policy: M, step: int, *, wanted: bool) -> M:
    """Note the new value in the policy."""
    return policy._replace(control={**policy.control, self.scalar: self.value})


@dataclasses.dataclass(frozen=True)
class SetLearningRateScale(Scalar):
  """Multiply the schedule's learning rate with `scale`, from now on.

  Attributes:
    scale: at most 32. The policy raises the rate above the schedule's only after the higher rate
      has won a comparison (`policy/triggers.py`), never in an emergency.
  """

  scalar, called, least, most = "lr_scale", "the learning rate's scale", 1e-6, 32.0
  words = "learning rate times {scale:.3g} of the schedule's ({before:.3g} before)"

  scale: float
  before: float = 1.0

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Set it, and raise the reflex's limit on the rate if the new rate is higher."""
    assert state.control is not None, "the run has no reflex"
    rises = self.scale > state.control.lr_scale
    state = super().apply(state, cfg, saved)
    if state.reflex is None:
      return state
    wanted = jnp.where(rises, self.scale * learning_rate(cfg, state.step), 0.0)
    return dataclasses.replace(state, reflex=state.reflex.allow_rate(wanted))

  def remember[M: Memory](self, policy: M, step: int, *, wanted: bool) -> M:
    """A requested rate is the one that recovery returns to after an emergency cut."""
    policy = super().remember(policy, step, wanted=wanted)
    return policy._replace(lr_wanted=self.scale) if wanted else policy


@dataclasses.dataclass(frozen=True)
class SetWeightDecay(Scalar):
  """Multiply `optimizer.weight_decay` with `scale`, from now on.

  Attributes:
    scale: in [0, 10]; repeated data wants more (Lovelace et al. 2026, arXiv:2605.01640).
  """

  scalar, called, least, most = "decay_scale", "the weight decay's scale", 0.0, 10.0
  needs = "optimizer.weight_decay"
  words = "weight decay times {scale:.3g} ({before:.3g} before)"

  scale: float
  before: float = 1.0


@dataclasses.dataclass(frozen=True)
class SetBalance(Scalar):
  """Multiply `moe.bias_rate`, with which the load of experts is balanced, with `scale`.

  The rate at which a collapsed router is rescued stays. The weights of balance losses are settings
  (`ChangeSettings`).

  Attributes:
    scale: in [0, 10].
  """

  scalar, called, least, most = "balance_scale", "the balance's scale", 0.0, 10.0
  needs = "moe.num_experts"
  words = "rate of the experts' balance times {scale:.3g} ({before:.3g} before)"

  scale: float
  before: float = 1.0

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range, and there is a selection bias."""
    super().check(cfg, step)
    if cfg.moe.bias_update == "none":
      raise ValueError(f"{self} does nothing in a run with moe.bias_update=none.")


@dataclasses.dataclass(frozen=True)
class SetExpertDropout(Scalar):
  """Let each expert sit out a step with probability `rate`, from now on, in training only.

  Attributes:
    rate: in [0, 0.5].
  """

  scalar, called, least, most = "expert_dropout", "the experts' dropout", 0.0, 0.5
  needs = "moe.num_experts"
  words = "experts sit out {rate:.3g} of the steps ({before:.3g} before)"

  rate: float
  before: float = 0.0
