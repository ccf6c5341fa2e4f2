"""States to go back to, in host memory: two that were found good, and one that is not yet known."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.step.state import TrainState

COPIES = 3
COPIES_OF_COMPARISON = 2  # where the arms part and where the best ends; one of COPIES is not taken
HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A state in host memory.

  Attributes:
    step: after which it was taken.
    arrays: the state, its key as numbers; what becomes of a restored one does not change it.
    shardings: shardings of its arrays on the devices.
    saved: what a checkpoint would hold beside the state, as JSON.
  """

  step: int
  arrays: TrainState
  shardings: Any
  saved: str

  @classmethod
  def take(cls, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> Self:
    """Start copying `state` to host memory; it may be donated right after."""
    # Keys cannot be put where several processes share them.
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    hosts = jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings)
    return cls(
      step, jax.device_put(state, hosts, may_alias=False), shardings, json.dumps(saved or {})
    )

  def resume(self) -> TrainState:
    """All of it, on the devices."""
    state = jax.device_put(self.arrays, self.shardings, may_alias=False)
    return dataclasses.replace(state, key=jax.random.wrap_key_data(state.key))

  def some[T](self, pick: Callable[[Any], T]) -> T:
    """What `pick` takes of the state, on the devices."""
    return jax.device_put(pick(self.arrays), pick(self.shardings), may_alias=False)

  @classmethod
  def swap_out(cls, step: int, state: TrainState) -> "Snapshot":
    """`take`, and free the device's memory: the state is gone until `resume`. Waits for it."""
    snapshot = cls.take(step, state)
    jax.block_until_ready(snapshot.arrays)
    for array in jax.tree.leaves(_parts(state)):
      array.delete()
    return snapshot


class Snapshots:
  """The ring. A state is good when the looks after it found nothing wrong.

  Attributes:
    good: the newest last, at most two.
    candidate: newer, and not known to be good.
    keeps_first: the first good one stays, whatever comes after it.
  """

  def __init__(self, every_steps: int, max_bytes: int):
    """Set how often a state is taken, and the most memory of this process that copies may hold."""
    self.good: tuple[Snapshot, ...] = ()
    self.candidate: Snapshot | None = None
    self.keeps_first = False
    self._every_steps = every_steps
    self._max_bytes = max_bytes

  @classmethod
  def of(cls, cfg: OrchestratorConfig) -> Self:
    """Those that the settings allow."""
    return cls(cfg.snapshot_interval, int(cfg.snapshot_gb * 2**30))

  def fits(self, state: TrainState, further: int = 0) -> bool:
    """Whether this process's part of `state` fits in the memory allowed, `further` copies too."""
    return (COPIES + further) * local_bytes(state) <= self._max_bytes

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """Begin with a state that counts as good: a new one, or that of a verified checkpoint."""
    self.good, self.candidate = (), None
    if self.fits(state):
      self.good = (Snapshot.take(step, state, saved),)

  def offer(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """Take `state` if it is time and there is room."""
    has_room = self.candidate is None
    if self.good and has_room and step - self.good[-1].step >= self._every_steps:
      self.candidate = Snapshot.take(step, state, saved)

  def confirm(self, first: int) -> None:
    """Accept the candidate if it was taken before step `first`, from which on steps were good."""
    if self.candidate is not None and self.candidate.step < first:
      older = self.good[:1] if self.keeps_first else self.good[-1:]
      self.good = (*older, self.candidate)
      self.candidate = None

  def return_to(self, step: int) -> None:
    """Drop newer snapshots: the run goes on from that of `step` along another path."""
    self.good = tuple(kept for kept in self.good if kept.step <= step)
    self.candidate = None

  def reject(self) -> None:
    """Drop the candidate, which may hold the beginning of a fault."""
    self.candidate = None

  def newest(self, saved_steps: Sequence[int]) -> tuple[int, TrainState, dict[str, Any]] | None:
    """The newest good one as a checkpoint would give it: step, state and the rest.

    None if there is none, or no earlier step is the last of `saved_steps`, those on the disk.
    """
    newest = self.back(0)
    if newest is None or newest.step <= max(saved_steps, default=-1):
      return None
    return newest.step, newest.resume(), json.loads(newest.saved)

  @property
  def first(self) -> Snapshot | None:
    """That of step 0, if it is still here."""
    return self.good[0] if self.good and self.good[0].step == 0 else None

  def back(self, number: int) -> Snapshot | None:
    """The `number`-th newest good one, from 0, or the oldest; None if there is none.

    A first one that is kept to begin anew from counts only if there is no other.
    """
    good = self.good[1:] if self.keeps_first and len(self.good) > 1 else self.good
    return good[max(-len(good), -1 - number)] if good else None


def local_bytes(state: TrainState) -> int:
  """Bytes that this process holds of what a snapshot holds; replicas on its devices count once."""
  shards = lambda x: {str(s.index): s.data.nbytes for s in x.addressable_shards}
  return sum(sum(shards(x).values()) for x in jax.tree.leaves(_parts(state)))


def _parts(state: TrainState) -> tuple[Any, ...]:
  return state.model, state.opt_state, state.ema, state.reflex, state.unsent
