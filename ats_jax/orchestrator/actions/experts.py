"""Edits of experts and routers within their arrays; each is a program of its own (surgery.py)."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions import surgery
from ats_jax.orchestrator.actions.base import Action, Now
from ats_jax.orchestrator.actions.expert_view import ExpertView, view_experts
from ats_jax.step.state import TrainState

if TYPE_CHECKING:
  from ats_jax.orchestrator.signals.interval import Reading


@dataclasses.dataclass(frozen=True)
class LayerEdit(Action, abstract=True):
  """An edit of the experts of a layer.

  Attributes:
    layer: index from the bottom.
  """

  edits: ClassVar[bool] = True
  at_pause: ClassVar[bool] = True

  layer: int

  def view(self, now: Now) -> ExpertView:
    """The experts of the layer."""
    return view_experts(now.cfg, now.state, self.layer)


@dataclasses.dataclass(frozen=True)
class ExpertEdit(LayerEdit, abstract=True):
  """An edit of one expert.

  Attributes:
    layer: index from the bottom.
    expert: its slot.
  """

  expert: int


class RecycleExpert(ExpertEdit):
  """Close an expert that gets no tokens, and split the most loaded one into its slot.

  The model computes the same function but for the tokens of the closed one (`surgery.recycle`).
  """

  prior: ClassVar[tuple[float, float]] = (7.2, 0.8)
  cooldown: ClassVar[int] = 10
  exact: ClassVar[bool] = True

  def fill(self, now: Now) -> Self:
    """Is it possible?"""
    self.view(now).check_recycle(now.cfg, self.expert, None)
    return self

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Prune and split."""
    return surgery.recycle(cfg, state, self.layer, self.expert)

  def undo(self) -> Action:
    """Close the fresh half: the split one is whole again."""
    return PruneExpert(self.layer, self.expert)

  def worked(self, reading: "Reading") -> bool:
    """The expert gets tokens."""
    return (self.layer, self.expert) not in reading.starved

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Which."""
    return (
      f"closes expert {self.expert} of layer {self.layer} and splits the busiest into its place"
    )


class PruneExpert(ExpertEdit):
  """Close an expert; of the halves of a split one, the other is whole again (`surgery.prune`)."""

  def fill(self, now: Now) -> Self:
    """Are enough left?"""
    self.view(now).without(now.cfg, self.expert)
    return self

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Close it."""
    return surgery.prune(cfg, state, self.layer, self.expert)

  def undo(self) -> Action:
    """Open it again."""
    return ReopenExpert(self.layer, self.expert)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Which."""
    return f"closes expert {self.expert} of layer {self.layer}"


class ReopenExpert(ExpertEdit):
  """Use a closed expert with the weights that it has (`surgery.reopen`)."""

  def fill(self, now: Now) -> Self:
    """Is it closed?"""
    self.view(now).check_idle(self.expert)
    return self

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Open it."""
    return surgery.reopen(cfg, state, self.layer, self.expert)

  def undo(self) -> Action:
    """Close it."""
    return PruneExpert(self.layer, self.expert)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Which."""
    return f"opens expert {self.expert} of layer {self.layer} again"


@dataclasses.dataclass(frozen=True)
class AddExpert(LayerEdit):
  """Open an idle slot with a half of an expert; the model computes the same (`surgery.split`).

  Attributes:
    layer: index from the bottom.
    expert: the one to split; -1 = the most loaded one.
    slot: the idle one; -1 = the nearest.
  """

  expert: int = -1
  slot: int = -1

  def fill(self, now: Now) -> Self:
    """Which expert, and where to."""
    view = self.view(now)
    expert = view.most_loaded() if self.expert < 0 else self.expert
    slot = view.check_split(expert, None if self.slot < 0 else self.slot)
    return dataclasses.replace(self, expert=expert, slot=slot)

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Split it."""
    return surgery.split(cfg, state, self.layer, self.expert, self.slot)

  def undo(self) -> Action:
    """Close the new half: the other is whole again."""
    return PruneExpert(self.layer, self.slot)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Which, and where to."""
    return (
      f"splits expert {self.expert} of layer {self.layer} in two, the other half is {self.slot}"
    )


@dataclasses.dataclass(frozen=True)
class SetPenalty(ExpertEdit):
  """Let the two halves of a split expert compete for all their tokens (`surgery.release`).

  Attributes:
    layer: index from the bottom.
    expert: one of the halves.
    penalty: what a half loses in its logit for the other's tokens; at 0 they are whole, for good.
    before: what it was.
  """

  penalty: float
  before: float = surgery.EXCLUSIVE

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range."""
    surgery.check_penalty(self.penalty)

  def fill(self, now: Now) -> Self:
    """Is it a half, and what was its penalty?"""
    view = self.view(now)
    view.check_half(self.expert)
    return dataclasses.replace(self, before=float(view.penalty[self.expert]))

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Set that of both halves."""
    return surgery.release(cfg, state, self.layer, self.expert, self.penalty)

  def undo(self) -> Action | None:
    """Set it back, while they are a pair."""
    if self.penalty == 0.0:
      return None
    return SetPenalty(self.layer, self.expert, self.before, self.penalty)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Both penalties."""
    return (
      f"penalty of expert {self.expert} of layer {self.layer} is {self.penalty:g} "
      f"({self.before:g} before)"
    )


@dataclasses.dataclass(frozen=True)
class MergeExperts(LayerEdit):
  """Make one expert of two, the mean of their weights by load; nothing undoes it (`surgery.merge`).

  Attributes:
    layer: index from the bottom.
    keep: the expert that is both from now on.
    drop: the one that is closed.
  """

  keep: int
  drop: int

  def fill(self, now: Now) -> Self:
    """Is it possible?"""
    self.view(now).check_merge(now.cfg, self.keep, self.drop)
    return self

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Merge them."""
    return surgery.merge(cfg, state, self.layer, self.keep, self.drop)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Which."""
    return f"merges expert {self.drop} of layer {self.layer} into {self.keep}"


@dataclasses.dataclass(frozen=True)
class ScaleTemperature(Action):
  """Multiply the temperature of all routers with `by`: their columns and offsets are divided.

  The order of a token's experts stays: this changes how evenly their weights are spread, in
  evaluation too, and does not balance loads.

  Attributes:
    by: in [0.5, 2].
  """

  edits: ClassVar[bool] = True

  by: float

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range, and there are experts."""
    if not 0.5 <= self.by <= 2.0:
      raise ValueError(
        f"the temperature is to be multiplied with {self.by}; it must be in [0.5, 2]."
      )
    if not cfg.moe.num_experts:
      raise ValueError(f"{self}: the model has no experts (moe.num_experts=0).")

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Divide."""
    return surgery.temper(state, self.by)

  def undo(self) -> Action:
    """Divide by the inverse."""
    return ScaleTemperature(1.0 / self.by)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """By how much."""
    return f"temperature of the routers times {self.by:.3g}"
