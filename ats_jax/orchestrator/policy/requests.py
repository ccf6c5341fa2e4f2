"""What hooks ask for: kept until its turn, and checked again before it is done."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.base import (
  Action,
  AddExpert,
  PruneExpert,
  RecycleExpert,
  ReopenExpert,
  Rollback,
  SaveCheckpoint,
  SetExpertDropout,
  SetLearningRateScale,
  SetPenalty,
  SetSkips,
  SetWeightDecay,
  Stop,
  Surgery,
  check,
  from_json,
  to_json,
)
from ats_jax.orchestrator.actions.expert_view import read_slots
from ats_jax.orchestrator.actions.settings import ChangeSettings, changed, values_of
from ats_jax.orchestrator.policy.capacity import more_room
from ats_jax.orchestrator.policy.state import Memory
from ats_jax.step.state import TrainState, first_bucket


class Request(NamedTuple):
  """An action that is wanted, though nothing is wrong.

  Attributes:
    action: what.
    cause: "request" of a hook; "trial" if it is to win a paired branch first, "branch" if it did.
    reason: in words.
  """

  action: Action
  cause: str = "request"
  reason: str = "a hook asked for it"

  def to_json(self) -> dict[str, Any]:
    """As JSON values."""
    return {**self._asdict(), "action": to_json(self.action)}

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Request":
    """What `to_json` made."""
    return cls(**{**fields, "action": from_json(fields["action"])})


class Ready(NamedTuple):
  """A request whose turn it is.

  Attributes:
    place: in the queue.
    request: with all that it left open filled in.
    refusal: why it is not possible as things are; empty if it is.
  """

  place: int
  request: Request
  refusal: str = ""


class Requests:
  """The queue of a run.

  Attributes:
    waiting: first come, first served, but experts are edited at a checkpoint only.
  """

  def __init__(self, cfg: Config, waiting: Iterable[Mapping[str, Any]] = ()):
    """Go on with what `to_json` gave."""
    self._cfg = cfg
    self._last: tuple[int, list[Request]] = (-1, [])  # of the last step with requests
    self.waiting = [Request.from_json(fields) for fields in waiting]

  def to_json(self) -> list[dict[str, Any]]:
    """As JSON values."""
    return [request.to_json() for request in self.waiting]

  def add(self, request: Request, step: int) -> None:
    """Take it in; once, though before a checkpoint there may be several looks at one step.

    Raises:
      ValueError: if this run can never do it.
    """
    action = request.action
    if request.cause == "trial":
      if not self._cfg.orchestrator.branch_steps:
        raise ValueError(f"{action} is to win a branch first, but orchestrator.branch_steps=0.")
      if isinstance(action, Rollback | ChangeSettings | SaveCheckpoint):
        raise ValueError(f"{action} cannot be tried on a branch. Ask for it without.")
    if isinstance(action, Stop) or action == Rollback(undo=True):
      raise ValueError(f"{action} is not for hooks to ask for.")
    check(action, self._cfg)
    if isinstance(action, ChangeSettings):
      changed(self._cfg, action, step)
    if self._last[0] != step:
      self._last = (step, [])
    if request not in self._last[1]:
      self._last[1].append(request)
      self.waiting.append(request)

  def make_room(self, memory: Memory, step: int) -> None:
    """Ask for more places of experts, if many choices have found none for long."""
    action = more_room(self._cfg, memory)
    if action is not None and not self.waiting and step < self._cfg.num_steps:
      self.add(Request(action, reason="experts had too few places for long"), step)

  def ready(
    self, memory: Memory, state: TrainState, step: int, *, pause: bool, trial: bool = False
  ) -> Ready | None:
    """The first whose turn it is.

    Args:
      memory: of the policy; says what was before.
      state: says which experts there are; read at a pause only.
      step: now.
      pause: whether the loop waits anyway, as before a checkpoint.
      trial: of those that are to be tried, or else of the others.
    """
    for place, request in enumerate(self.waiting):
      if trial is not (request.cause == "trial"):
        continue
      if pause or not isinstance(request.action, Surgery):
        try:
          action = self._filled_in(request.action, memory, state, step)
        except ValueError as error:
          return Ready(place, request, str(error))
        return Ready(place, request._replace(action=action))
    return None

  def _filled_in(self, action: Action, memory: Memory, state: TrainState, step: int) -> Action:
    match action:
      case SetLearningRateScale():
        return dataclasses.replace(action, before=memory.lr_scale)
      case SetSkips():
        return dataclasses.replace(action, before=memory.bucket or first_bucket(self._cfg))
      case SetWeightDecay():
        return dataclasses.replace(action, before=memory.decay_scale)
      case SetExpertDropout():
        return dataclasses.replace(action, before=memory.expert_dropout)
      case ChangeSettings():
        changed(self._cfg, action, step)
        return dataclasses.replace(action, before=values_of(self._cfg, action))
    if not isinstance(action, Surgery):
      return action
    view = read_slots(self._cfg, state, action.layer)
    match action:
      case AddExpert(layer, expert, slot):
        expert = view.most_loaded() if expert < 0 else expert
        return AddExpert(layer, expert, view.check_split(expert, None if slot < 0 else slot))
      case RecycleExpert(_, expert):
        view.check_recycle(self._cfg, expert, None)
      case PruneExpert(_, expert):
        view.without(self._cfg, expert)
      case ReopenExpert(_, expert):
        view.check_idle(expert)
      case SetPenalty(_, expert):
        view.check_half(expert)
        return dataclasses.replace(action, before=float(view.penalty[expert]))
    return action
