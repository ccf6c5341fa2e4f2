"""What the supervisor can do to a run: small typed values, one pure function that does them.

An action says what will be and what was, so that it can be undone; none of them makes a new
program: they write scalars that the compiled step reads, or put a snapshot back.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

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
class Stop:
  """End the run: what would help was tried, and did not."""


Action = SetLearningRateScale | SetSkips | Rollback | Stop
KINDS = {kind.__name__: kind for kind in (SetLearningRateScale, SetSkips, Rollback, Stop)}


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
    case Rollback() | Stop():
      return None


def apply(action: Action, state: TrainState, saved: TrainState | None = None) -> TrainState:
  """The state in which training goes on.

  Args:
    action: what to do; `Stop` is not for the state.
    state: as the last step left it, of a run with `orchestrator.mode=act`.
    saved: for `Rollback`, an earlier state on the same devices.

  Raises:
    ValueError: for a value that no run can go on with.
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
    case Stop():
      raise AssertionError("a stop is for the loop")


def _with(state: TrainState, control: Control) -> TrainState:
  return dataclasses.replace(state, control=control)
