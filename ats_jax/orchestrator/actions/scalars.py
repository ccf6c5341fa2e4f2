"""Scalars that the compiled step reads: setting one needs no new program."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.base import Scalar

if TYPE_CHECKING:
  from ats_jax.orchestrator.policy.state import PolicyState

MOST_RATE, MOST_DECAY, MOST_DROPPED = 32.0, 10.0, 0.5  # what may be asked for


@dataclasses.dataclass(frozen=True)
class SetLearningRateScale(Scalar):
  """Multiply the schedule's learning rate with `scale`, from now on.

  Attributes:
    scale: in (0, 32]; a higher rate than the schedule's is no emergency measure: the policy alone
      never asks for one, but after it won on the same steps (`plateau.py`).
    before: what it was.
  """

  scalar: ClassVar[str] = "lr_scale"
  prior: ClassVar[tuple[float, float]] = (6.8, 1.2)
  cooldown: ClassVar[int] = 5

  scale: float
  before: float = 1.0

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range."""
    if not 0.0 < self.scale <= MOST_RATE:
      raise ValueError(
        f"the learning rate's scale is {self.scale}; it must be in (0, {MOST_RATE:g}]."
      )

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Both scales."""
    return f"learning rate times {self.scale:.3g} of the schedule's ({self.before:.3g} before)"

  def remember(self, policy: "PolicyState", step: int, *, wanted: bool) -> "PolicyState":
    """One that is wanted is what a rate lowered in need is given back to."""
    policy = super().remember(policy, step, wanted=wanted)
    return policy._replace(lr_wanted=self.scale) if wanted else policy

  def retract(self, policy: "PolicyState") -> "PolicyState":
    """Give back to what was before."""
    return policy._replace(lr_wanted=self.before)


@dataclasses.dataclass(frozen=True)
class SetSkips(Scalar):
  """Let the reflex leave out up to `bucket` batches in a row for their loss.

  It is not judged: leaving batches out keeps the state as it is.

  Attributes:
    bucket: at least 1.
    before: what it was.
  """

  scalar: ClassVar[str] = "bucket"
  prior: ClassVar[tuple[float, float]] = (7.2, 0.8)
  cooldown: ClassVar[int] = 1
  judged: ClassVar[bool] = False

  bucket: float
  before: float = 0.0

  def check(self, cfg: Config, step: int = 0) -> None:
    """One batch at least."""
    if not self.bucket >= 1.0:
      raise ValueError(f"{self.bucket} batches in a row to leave out; it must be 1 or more.")

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Both numbers."""
    return f"up to {self.bucket:g} batches in a row may be left out ({self.before:g} before)"


@dataclasses.dataclass(frozen=True)
class SetWeightDecay(Scalar):
  """Multiply `optimizer.weight_decay` with `scale`, from now on.

  Attributes:
    scale: in [0, 10]; repeated data wants more (Lovelace et al. 2026, arXiv:2605.01640).
    before: what it was.
  """

  scalar: ClassVar[str] = "decay_scale"

  scale: float
  before: float = 1.0

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range, and there is a decay."""
    if not 0.0 <= self.scale <= MOST_DECAY:
      raise ValueError(
        f"the weight decay's scale is {self.scale}; it must be in [0, {MOST_DECAY:g}]."
      )
    if not cfg.optimizer.weight_decay:
      raise ValueError("optimizer.weight_decay=0 stays 0 however it is multiplied.")

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Both scales."""
    return f"weight decay times {self.scale:.3g} ({self.before:.3g} before)"


@dataclasses.dataclass(frozen=True)
class SetExpertDropout(Scalar):
  """Let each expert sit out a step with probability `rate`, from now on, in training only.

  Attributes:
    rate: in [0, 0.5].
    before: what it was.
  """

  scalar: ClassVar[str] = "expert_dropout"

  rate: float
  before: float = 0.0

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range, and there are experts."""
    if not 0.0 <= self.rate <= MOST_DROPPED:
      raise ValueError(f"the experts' dropout is {self.rate}; it must be in [0, {MOST_DROPPED:g}].")
    if not cfg.moe.num_experts:
      raise ValueError(f"{self}: the model has no experts (moe.num_experts=0).")

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Both probabilities."""
    return f"experts sit out {self.rate:.3g} of the steps ({self.before:.3g} before)"
