"""What the supervisor can do to a run: small typed values, one pure function that does them.

An action says what will be and what was, so that it can be undone. Only after `ChangeSettings` is
the train step compiled again: the others write scalars that it reads, put a snapshot back, or edit
experts and routers within their arrays (a program of its own, compiled at its first use).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions import surgery
from ats_jax.orchestrator.actions.settings import ChangeSettings
from ats_jax.step.state import TrainState

MOST_RATE, MOST_DECAY, MOST_DROPPED = 32.0, 10.0, 0.5  # what may be asked for


@dataclasses.dataclass(frozen=True)
class SetLearningRateScale:
  """Multiply the schedule's learning rate with `scale`, from now on.

  Attributes:
    scale: in (0, 32]; a higher rate than the schedule's is no emergency measure: the policy alone
      never asks for one, but after it won on the same steps (`plateau.py`).
    before: what it was.
  """

  scale: float
  before: float = 1.0


@dataclasses.dataclass(frozen=True)
class SetSkips:
  """Let the reflex leave out up to `bucket` batches in a row for their loss.

  Attributes:
    bucket: at least 1.
    before: what it was.
  """

  bucket: float
  before: float = 0.0


@dataclasses.dataclass(frozen=True)
class SetWeightDecay:
  """Multiply `optimizer.weight_decay` with `scale`, from now on.

  Attributes:
    scale: in [0, 10]; repeated data wants more (Lovelace et al. 2026, arXiv:2605.01640).
    before: what it was.
  """

  scale: float
  before: float = 1.0


@dataclasses.dataclass(frozen=True)
class SetExpertDropout:
  """Let each expert sit out a step with probability `rate`, from now on, in training only.

  Attributes:
    rate: in [0, 0.5].
    before: what it was.
  """

  rate: float
  before: float = 0.0


@dataclasses.dataclass(frozen=True)
class ScaleTemperature:
  """Multiply the temperature of all routers with `by`: their columns and offsets are divided.

  The order of a token's experts stays: this changes how evenly their weights are spread, in
  evaluation too, and does not balance loads.

  Attributes:
    by: in [0.5, 2].
  """

  by: float


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
class AddExpert:
  """Open an idle slot with a half of an expert; the model computes the same (`surgery.split`).

  Attributes:
    layer: index from the bottom.
    expert: the one to split; -1 = the most loaded one.
    slot: the idle one; -1 = the nearest.
  """

  layer: int
  expert: int = -1
  slot: int = -1


@dataclasses.dataclass(frozen=True)
class SetPenalty:
  """Let the two halves of a split expert compete for all their tokens (`surgery.release`).

  Attributes:
    layer: index from the bottom.
    expert: one of the halves.
    penalty: what a half loses in its logit for the other's tokens; at 0 they are whole, for good.
    before: what it was.
  """

  layer: int
  expert: int
  penalty: float
  before: float = surgery.EXCLUSIVE


@dataclasses.dataclass(frozen=True)
class SaveCheckpoint:
  """Save a checkpoint now, whatever `checkpoint.every_steps` says."""


@dataclasses.dataclass(frozen=True)
class Stop:
  """End the run: what would help was tried, and did not."""


Surgery = RecycleExpert | PruneExpert | ReopenExpert | AddExpert | SetPenalty
Scalar = SetLearningRateScale | SetSkips | SetWeightDecay | SetExpertDropout
Action = Scalar | Rollback | Stop | Surgery | ScaleTemperature | ChangeSettings | SaveCheckpoint
KINDS = {kind.__name__: kind for kind in get_args(Action)}


def to_json(action: Action) -> dict[str, Any]:
  """As JSON values: its fields, and its kind as "action"."""
  return {"action": type(action).__name__, **dataclasses.asdict(action)}


def from_json(fields: Mapping[str, Any]) -> Action:
  """What `to_json` made, also after a JSON file held it."""
  frozen = lambda v: tuple(map(frozen, v)) if isinstance(v, list) else v
  return KINDS[fields["action"]](**{k: frozen(v) for k, v in fields.items() if k != "action"})


def undo(action: Action) -> Action | None:
  """The action that takes `action` back; None if nothing can."""
  match action:
    case (
      SetLearningRateScale(value, before)
      | SetSkips(value, before)
      | SetWeightDecay(value, before)
      | SetExpertDropout(value, before)
    ):
      return type(action)(before, value)
    case ScaleTemperature(by):
      return ScaleTemperature(1.0 / by)
    case ChangeSettings(settings, before):
      return ChangeSettings(before, settings)
    case SetPenalty(layer, expert, penalty, before) if penalty > 0.0:
      return SetPenalty(layer, expert, before, penalty)
    case AddExpert(layer, _, slot):
      return PruneExpert(layer, slot)  # the other half is whole again
    case Rollback(_, undo=False):
      return Rollback(undo=True)
    case RecycleExpert(layer, expert) | ReopenExpert(layer, expert):
      return PruneExpert(layer, expert)  # of a fresh half: the split one is whole again
    case PruneExpert(layer, expert):
      return ReopenExpert(layer, expert)
    case _:
      return None


def apply(
  action: Action, state: TrainState, cfg: Config, saved: TrainState | None = None
) -> TrainState:
  """The state in which training goes on.

  Args:
    action: what to do; `Stop`, `ChangeSettings` and `SaveCheckpoint` are not for the state.
    state: as the last step left it, of a run with `orchestrator.mode=act`; surgery donates it.
    cfg: the run.
    saved: for `Rollback`, an earlier state on the same devices.

  Raises:
    ValueError: for a value that no run can go on with.
    SurgeryError: for surgery that is not possible; the state is as it was.
  """
  control = state.control
  assert control is not None, "the run has no reflex"
  check(action, cfg)
  match action:
    case SetLearningRateScale(scale):
      return _set(state, lr_scale=scale)
    case SetSkips(bucket):
      return _set(state, bucket=bucket)
    case SetWeightDecay(scale):
      return _set(state, decay_scale=scale)
    case SetExpertDropout(rate):
      return _set(state, expert_dropout=rate)
    case ScaleTemperature(by):
      return surgery.temper(state, by)
    case AddExpert(layer, expert, slot):
      return surgery.split(cfg, state, layer, expert, slot)
    case SetPenalty(layer, expert, penalty):
      return surgery.release(cfg, state, layer, expert, penalty)
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
    case Stop() | ChangeSettings() | SaveCheckpoint():
      raise AssertionError(f"{action} is for the loop")


def check(action: Action, cfg: Config) -> None:
  """Is it something that a run of `cfg` can go on with? Says nothing of the state.

  Raises:
    ValueError: if not.
  """
  match action:
    case SetLearningRateScale(scale):
      if not 0.0 < scale <= MOST_RATE:
        raise ValueError(f"the learning rate's scale is {scale}; it must be in (0, {MOST_RATE:g}].")
    case SetSkips(bucket):
      if not bucket >= 1.0:
        raise ValueError(f"{bucket} batches in a row to leave out; it must be 1 or more.")
    case SetWeightDecay(scale):
      if not 0.0 <= scale <= MOST_DECAY:
        raise ValueError(f"the weight decay's scale is {scale}; it must be in [0, {MOST_DECAY:g}].")
      if not cfg.optimizer.weight_decay:
        raise ValueError("optimizer.weight_decay=0 stays 0 however it is multiplied.")
    case SetExpertDropout(rate):
      if not 0.0 <= rate <= MOST_DROPPED:
        raise ValueError(f"the experts' dropout is {rate}; it must be in [0, {MOST_DROPPED:g}].")
      _check_experts(action, cfg)
    case ScaleTemperature(by):
      if not 0.5 <= by <= 2.0:
        raise ValueError(f"the temperature is to be multiplied with {by}; it must be in [0.5, 2].")
      _check_experts(action, cfg)
    case SetPenalty(_, _, penalty):
      if not 0.0 <= penalty <= surgery.EXCLUSIVE:
        raise ValueError(f"penalty={penalty} is not in [0, {surgery.EXCLUSIVE:g}].")


def _check_experts(action: Action, cfg: Config) -> None:
  if not cfg.moe.num_experts:
    raise ValueError(f"{action}: the model has no experts (moe.num_experts=0).")


def _set(state: TrainState, **value: float) -> TrainState:
  assert state.control is not None
  arrays = {name: jnp.full_like(getattr(state.control, name), x) for name, x in value.items()}
  return dataclasses.replace(state, control=state.control._replace(**arrays))
