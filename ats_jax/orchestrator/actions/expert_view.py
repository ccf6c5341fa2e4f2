"""The experts of a layer as the host sees them, and which edits of them are possible."""

from typing import NamedTuple

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.model.layout import segments_of
from ats_jax.model.moe import MoE
from ats_jax.step.state import TrainState


class SurgeryError(ValueError):
  """The edit is not possible; the state is as it was."""


class StackIndex(NamedTuple):
  """Where the parameters of a layer are in the decoder, whose layers are stacked.

  Attributes:
    block: index of the segment, and of the layer in its super-block.
    repeat: index of the layer along the first dimension of the stacked arrays.
  """

  block: tuple[int, int]
  repeat: int


class ExpertView(NamedTuple):
  """The experts of one layer; the arrays are over its slots, those of groups beside each other.

  Attributes:
    layer: index from the bottom.
    is_open: bool; tokens can go there.
    twin: int, the other half of a split expert; -1 for a whole one.
    penalty: what a half subtracts from its logit for tokens on the other side.
    load: share of the layer's choices in the last step.
    group: int, for group-limited routing.
  """

  layer: int
  is_open: np.ndarray
  twin: np.ndarray
  penalty: np.ndarray
  load: np.ndarray
  group: np.ndarray

  def most_loaded(self, group: int | None = None) -> int:
    """The whole expert with the highest load: what to split.

    Args:
      group: look in this one only.

    Raises:
      SurgeryError: if there is no whole expert.
    """
    usable = self.is_open & (self.twin < 0)
    usable &= True if group is None else self.group == group
    if not usable.any():
      raise SurgeryError(f"layer {self.layer}: all experts are halves. Release some to penalty 0.")
    return int(np.argmax(np.where(usable, self.load, -np.inf)))

  def check_slot(self, slot: int) -> None:
    """Is there such a slot?"""
    if not 0 <= slot < self.is_open.size:
      raise SurgeryError(
        f"layer {self.layer} has no slot {slot}: it has 0 to {self.is_open.size - 1}."
      )

  def check_open(self, expert: int) -> None:
    """Is it an expert in use?"""
    self.check_slot(expert)
    if not self.is_open[expert]:
      raise SurgeryError(
        f"layer {self.layer}: slot {expert} is idle, no expert in use. In use: "
        f"{np.flatnonzero(self.is_open).tolist()}."
      )

  def check_idle(self, slot: int) -> None:
    """Is it a slot not in use?"""
    self.check_slot(slot)
    if self.is_open[slot]:
      raise SurgeryError(
        f"layer {self.layer}: slot {slot} is in use. Idle: "
        f"{np.flatnonzero(~self.is_open).tolist()}; prune or merge experts to have more."
      )

  def check_whole(self, expert: int) -> None:
    """Is it no half of a split expert?"""
    if (twin := self.twin[expert]) >= 0:
      raise SurgeryError(
        f"layer {self.layer}: expert {expert} is a half of a split expert, the other is {twin}. "
        "Release them to penalty 0, or prune or merge them, first."
      )

  def check_half(self, expert: int) -> None:
    """Is it a half of a split expert?"""
    self.check_slot(expert)
    if self.twin[expert] < 0:
      raise SurgeryError(f"layer {self.layer}: expert {expert} is no half of a split expert.")

  def check_group(self, slot: int, other: int) -> None:
    """Are both in one group?"""
    groups = self.group[[slot, other]]
    if groups[0] != groups[1]:
      raise SurgeryError(
        f"layer {self.layer}: slots {slot} and {other} are in groups {groups[0]} and {groups[1]}, "
        "between which tokens choose (moe.num_groups). Use two of one group."
      )

  def check_split(self, expert: int, slot: int | None) -> int:
    """Can `expert` be split into `slot`? Returns the slot, the nearest idle one if None."""
    self.check_open(expert)
    self.check_whole(expert)
    if slot is None:
      idle = np.flatnonzero(~self.is_open & (self.group == self.group[expert]))
      if not idle.size:
        raise SurgeryError(
          f"layer {self.layer}: no idle slot for a half of expert {expert}. Prune or merge some, "
          "or recycle a dead one."
        )
      return int(idle[np.argmin(np.abs(idle - expert))])
    self.check_idle(slot)
    self.check_group(expert, slot)
    return slot

  def check_recycle(self, cfg: Config, dead: int) -> int:
    """Can `dead` make room for a half of the most loaded expert? Returns that."""
    after = self.without(cfg, dead)
    source = after.most_loaded(after.group[dead])
    after.check_split(source, dead)
    return source

  def check_merge(self, cfg: Config, keep: int, drop: int) -> None:
    """Can `keep` become the mean of both?"""
    self.check_open(keep)
    after = self.without(cfg, drop)
    if keep == drop:
      raise SurgeryError(f"layer {self.layer}: expert {keep} cannot be merged with itself.")
    self.check_group(keep, drop)
    after.check_whole(keep)  # of another pair
    if self.twin[drop] != keep:
      self.check_whole(drop)

  def without(self, cfg: Config, expert: int) -> "ExpertView":
    """The layer without an expert, if enough are left for every token."""
    self.check_open(expert)
    is_open, twin = self.is_open.copy(), self.twin.copy()
    is_open[expert] = False
    twin[(self.twin == expert) | (np.arange(twin.size) == expert)] = -1
    choices = is_open - 0.5 * (twin >= 0)  # the halves of a pair are one choice for a token
    of_group = np.bincount(self.group, choices, cfg.moe.num_groups)
    left = np.sort(of_group)[: cfg.moe.top_groups].sum()
    if left < cfg.moe.top_k:
      raise SurgeryError(
        f"layer {self.layer}: without expert {expert} a token can choose among {left:.0f} experts "
        f"(moe.top_groups={cfg.moe.top_groups}; a split pair is one), but moe.top_k="
        f"{cfg.moe.top_k}. Open another expert, or release a pair to penalty 0, first."
      )
    return self._replace(is_open=is_open, twin=twin)


def find_layer(cfg: Config, layer: int) -> StackIndex:
  """Return where the parameters of a layer with experts are.

  Raises:
    SurgeryError: if it has none.
  """
  by_layer = {}
  for number, segment in enumerate(segments_of(cfg)):
    for member, kind in enumerate(segment.kinds):
      for repeat, index in enumerate(segment.layer_indices(member)):
        if kind.moe:
          by_layer[index] = StackIndex((number, member), repeat)
  if layer not in by_layer:
    raise SurgeryError(f"layer {layer} has no experts; layers {sorted(by_layer)} have.")
  return by_layer[layer]


def view_experts(cfg: Config, state: TrainState, layer: int) -> ExpertView:
  """Read the experts of a layer. Waits for the step that makes `state`.

  Raises:
    SurgeryError: if the layer has no experts, or surgery is off.
  """
  (segment, member), repeat = find_layer(cfg, layer)
  if not cfg.moe.spare_experts:
    raise SurgeryError(
      "surgery is off: with moe.spare_experts=0 the routers keep no buffers for closed and split "
      "experts. Start the run with moe.spare_experts >= 1 (mesh.expert divides num_experts + "
      "spare_experts, num_groups divides spare_experts)."
    )
  mlp = state.model.segments[segment].layers[member].mlp
  assert isinstance(mlp, MoE)
  router = mlp.router
  buffers = router.active_S, router.side_S, router.penalty_S, router.direction_SD, router.load_E
  is_open, side, penalty, direction, load = (np.asarray(b[...])[repeat] for b in buffers)
  # The halves of a pair are on the two sides of one plane.
  is_twin = (side[:, None] * side < 0) & (direction[:, None] == direction).all(axis=-1)
  return ExpertView(
    layer=layer,
    is_open=is_open > 0,
    twin=np.where(is_twin.any(axis=1), is_twin.argmax(axis=1), -1),
    penalty=penalty,
    load=load[: side.size],
    group=np.arange(side.size) * cfg.moe.num_groups // side.size,
  )
