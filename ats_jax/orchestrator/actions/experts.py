"""Edits of experts and routers within their arrays; each is a program of its own (surgery.py)."""

import abc
import dataclasses
from typing import Self

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions import surgery
from ats_jax.orchestrator.actions.base import Action, Now
from ats_jax.orchestrator.actions.expert_view import (
  ExpertView,
  StackIndex,
  SurgeryError,
  find_layer,
  view_experts,
)
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.base import Codec
from ats_jax.step.state import TrainState


def _codecs(cfg: Config) -> tuple[Codec, ...]:
  """Those of the run's optimizer, which are the same on any platform."""
  return build_optimizer(cfg, "cpu").codecs


@dataclasses.dataclass(frozen=True)
class LayerEdit(Action, abc.ABC, abstract=True):
  """An edit of the experts of a layer.

  Attributes:
    layer: index from the bottom.
  """

  edits = at_pause = True

  layer: int

  def fill(self, now: Now) -> Self:
    """Is it possible, and of which experts?"""
    return self._resolve(now.cfg, view_experts(now.cfg, now.state, self.layer))

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Edit, if it is possible."""
    view = view_experts(cfg, state, self.layer)
    return self._resolve(cfg, view)._edit(state, find_layer(cfg, self.layer), cfg, view)

  @abc.abstractmethod
  def _resolve(self, cfg: Config, view: ExpertView) -> Self:
    """With what was left open filled in; a `SurgeryError` if it is not possible."""

  @abc.abstractmethod
  def _edit(self, state: TrainState, at: StackIndex, cfg: Config, view: ExpertView) -> TrainState:
    """Make it; it is possible and nothing is open."""


@dataclasses.dataclass(frozen=True)
class ExpertEdit(LayerEdit, abstract=True):
  """An edit of one expert.

  Attributes:
    layer: index from the bottom.
    expert: slot of the expert.
  """

  expert: int


class RecycleExpert(ExpertEdit):
  """Close an expert that gets no tokens, and split the most loaded one into its slot.

  The model computes the same function but for the tokens of the closed one.
  """

  words = "closes expert {expert} of layer {layer} and splits the busiest into its place"

  def _resolve(self, cfg: Config, view: ExpertView) -> Self:
    view.check_recycle(cfg, self.expert)
    return self

  def _edit(self, state: TrainState, at: StackIndex, cfg: Config, view: ExpertView) -> TrainState:
    source = view.check_recycle(cfg, self.expert)
    state = surgery.prune(state, *at, self.expert, view.twin[self.expert])
    return surgery.split(state, *at, self.layer, source, self.expert, _codecs(cfg))


class PruneExpert(ExpertEdit):
  """Close an expert; of the halves of a split one, the other is whole again."""

  words = "closes expert {expert} of layer {layer}"

  def _resolve(self, cfg: Config, view: ExpertView) -> Self:
    view.without(cfg, self.expert)
    return self

  def _edit(self, state: TrainState, at: StackIndex, cfg: Config, view: ExpertView) -> TrainState:
    return surgery.prune(state, *at, self.expert, view.twin[self.expert])


@dataclasses.dataclass(frozen=True)
class AddExpert(LayerEdit):
  """Open an idle slot with a half of an expert; the model computes the same.

  Attributes:
    layer: index from the bottom.
    expert: the one to split; -1 = the most loaded one.
    slot: the idle one; -1 = the nearest.
  """

  words = "splits expert {expert} of layer {layer} in two, the other half is {slot}"

  expert: int = -1
  slot: int = -1

  def _resolve(self, cfg: Config, view: ExpertView) -> Self:
    expert = view.most_loaded() if self.expert < 0 else self.expert
    slot = view.check_split(expert, None if self.slot < 0 else self.slot)
    return dataclasses.replace(self, expert=expert, slot=slot)

  def _edit(self, state: TrainState, at: StackIndex, cfg: Config, view: ExpertView) -> TrainState:
    return surgery.split(state, *at, self.layer, self.expert, self.slot, _codecs(cfg))


@dataclasses.dataclass(frozen=True)
class SetPenalty(ExpertEdit):
  """Let the two halves of a split expert compete for all their tokens.

  Attributes:
    layer: index from the bottom.
    expert: one of the halves.
    penalty: what a half loses in its logit for the other's tokens; at 0 they are whole, for good.
    before: the penalty before the action.
  """

  words = "penalty of expert {expert} of layer {layer} is {penalty:g} ({before:g} before)"

  penalty: float
  before: float = surgery.EXCLUSIVE

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range."""
    if not 0.0 <= self.penalty <= surgery.EXCLUSIVE:
      raise SurgeryError(f"penalty={self.penalty} is not in [0, {surgery.EXCLUSIVE:g}].")

  def _resolve(self, cfg: Config, view: ExpertView) -> Self:
    view.check_half(self.expert)
    self.check(cfg)
    return dataclasses.replace(self, before=float(view.penalty[self.expert]))

  def _edit(self, state: TrainState, at: StackIndex, cfg: Config, view: ExpertView) -> TrainState:
    twin = view.twin[self.expert]
    return surgery.release(state, *at, self.expert, twin, self.penalty)


@dataclasses.dataclass(frozen=True)
class MergeExperts(LayerEdit):
  """Make one expert of two, the mean of their weights by load; nothing undoes it.

  Attributes:
    layer: index from the bottom.
    keep: the expert that is both from now on.
    drop: the one that is closed.
  """

  words = "merges expert {drop} of layer {layer} into {keep}"

  keep: int
  drop: int

  def _resolve(self, cfg: Config, view: ExpertView) -> Self:
    view.check_merge(cfg, self.keep, self.drop)
    return self

  def _edit(self, state: TrainState, at: StackIndex, cfg: Config, view: ExpertView) -> TrainState:
    return surgery.merge(state, *at, self.keep, self.drop, cfg.moe, _codecs(cfg))


@dataclasses.dataclass(frozen=True)
class ScaleTemperature(Action):
  """Multiply the temperature of all routers with `by`: their columns and offsets are divided.

  The order of a token's experts stays: this changes how evenly their weights are spread, in
  evaluation too, and does not balance loads.

  Attributes:
    by: in [0.5, 2].
  """

  edits = True
  needs = "moe.num_experts"
  words = "temperature of the routers times {by:.3g}"

  by: float

  def check(self, cfg: Config, step: int = 0) -> None:
    """It is in its range."""
    if not 0.5 <= self.by <= 2.0:
      raise ValueError(
        f"the temperature is to be multiplied with {self.by}; it must be in [0.5, 2]."
      )
    super().check(cfg, step)

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Divide."""
    return surgery.temper(state, self.by)
