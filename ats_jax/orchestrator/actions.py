"""What the supervisor can do to a run: small typed values, one pure function that does them.

An action says what will be and what was, so that it can be undone; after none of them the train
step is compiled again: they write scalars that it reads, put a snapshot back, or edit experts
within their arrays (a program of its own, compiled at its first use).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.orchestrator import surgery
from ats_jax.step.reflex import Control
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class SetLearningRateScale:
  """Multiply the schedule's learning rate with `scale`, from now on.

  Attributes:
    scale: in (0, 1]; a higher rate than the schedule's is no emergency measure.
    before: what it was.
  """

  scale: float
  before: float


@dataclasses.dataclass(frozen=True)
class SetSkips:
  """Let the reflex leave out up to `bucket` batches in a row for their loss.

  Attributes:
    bucket: at least 1.
    before: what it was.
  """

  bucket: float
  before: float


@dataclasses.dataclass(frozen=True)
class Rollback:
  """Take weights, moments and statistics from a snapshot; the data is not rewound.

  Attributes:
    back: 0 for the newest snapshot that was found good, 1 for the one before it.
    undo: take the state that the last rollback left instead.
  """

  back: int = 0
  undo: bool = False


@dataclasses.dataclass(frozen=True)
class _OfExpert:
  """An edit of one expert.

  Attributes:
    layer: index from the bottom.
    expert: its slot.
  """

  layer: int
  expert: int


class RecycleExpert(_OfExpert):
  """Close an expert that gets no tokens, and split the most loaded one into its slot.

  The model computes the same function but for the tokens of the closed one (`surgery.recycle`).
  """


class PruneExpert(_OfExpert):
  """Close an expert; of the halves of a split one, the other is whole again (`surgery.prune`)."""


class ReopenExpert(_OfExpert):
  """Use a closed expert with the weights that it has (`surgery.reopen`)."""


@dataclasses.dataclass(frozen=True)
class Stop:
  """End the run: what would help was tried, and did not."""


Surgery = RecycleExpert | PruneExpert | ReopenExpert
Action = SetLearningRateScale | SetSkips | Rollback | Stop | Surgery
KINDS = {kind.__name__: kind for kind in get_args(Action)}


def to_json(action: Action) -> dict[str, Any]:
  """As JSON values: its fields, and its kind as "action"."""
  return {"action": type(action).__name__, **dataclasses.asdict(action)}


def from_json(fields: Mapping[str, Any]) -> Action:
  """What `to_json` made."""
  return KINDS[fields["action"]](**{k: v for k, v in fields.items() if k != "action"})


def undo(action: Action) -> Action | None:
  """The action that takes `action` back; None if nothing can."""
  match action:
    case SetLearningRateScale(scale, before):
      return SetLearningRateScale(before, scale)
    case SetSkips(bucket, before):
      return SetSkips(before, bucket)
    case Rollback(_, undo=False):
      return Rollback(undo=True)
    case RecycleExpert(layer, expert) | ReopenExpert(layer, expert):
      return PruneExpert(layer, expert)  # of a fresh half: the split one is whole again
    case PruneExpert(layer, expert):
      return ReopenExpert(layer, expert)
    case Rollback() | Stop():
      return None


def apply(
  action: Action, state: TrainState, cfg: Config, saved: TrainState | None = None
) -> TrainState:
  """The state in which training goes on.

  Args:
    action: what to do; `Stop` is not for the state.
    state: as the last step left it, of a run with `orchestrator.mode=act`; surgery donates it.
    cfg: the run.
    saved: for `Rollback`, an earlier state on the same devices.

  Raises:
    ValueError: for a value that no run can go on with.
    SurgeryError: for surgery that is not possible; the state is as it was.
  """
  control = state.control
  assert control is not None, "the run has no reflex"
  match action:
    case SetLearningRateScale(scale):
      if not 0.0 < scale <= 1.0:
        raise ValueError(f"the learning rate's scale is {scale}; it must be in (0, 1].")
      return _with(state, control._replace(lr_scale=jnp.full_like(control.lr_scale, scale)))
    case SetSkips(bucket):
      if not bucket >= 1.0:
        raise ValueError(f"{bucket} batches in a row to leave out; it must be 1 or more.")
      return _with(state, control._replace(bucket=jnp.full_like(control.bucket, bucket)))
    case Rollback():
      assert saved is not None, "nothing to go back to"
      # The step counts batches, and those are gone: schedule and randomness go on from here.
      return dataclasses.replace(saved, step=state.step, key=state.key, control=control)
    case RecycleExpert(layer, expert):
      return surgery.recycle(cfg, state, layer, expert)
    case PruneExpert(layer, expert):
      return surgery.prune(cfg, state, layer, expert)
    case ReopenExpert(layer, expert):
      return surgery.reopen(cfg, state, layer, expert)
    case Stop():
      raise AssertionError("a stop is for the loop")


def _with(state: TrainState, control: Control) -> TrainState:
  return dataclasses.replace(state, control=control)
