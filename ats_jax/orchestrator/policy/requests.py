"""What hooks ask for: kept until its turn, and checked again before it is done."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.base import Now
from ats_jax.orchestrator.policy.state import PolicyState, Request
from ats_jax.step.state import TrainState


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
    """Return the fields as JSON values."""
    return [request.to_json() for request in self.waiting]

  def check(self, request: Request, step: int) -> None:
    """Check that this run can ever do it after `step`.

    Raises:
      ValueError: if not.
    """
    action = request.action
    if not action.can_be_asked_for:
      raise ValueError(f"{action} is not for hooks to ask for.")
    if request.cause == "comparison" and not action.can_be_tried:
      raise ValueError(f"{action} cannot be compared on the next steps. Ask for it without Try.")
    action.check(self._cfg, step)

  def add(self, request: Request, step: int) -> None:
    """Take it in; once, though before a checkpoint there may be several looks at one step.

    Raises:
      ValueError: if this run can never do it.
    """
    self.check(request, step)
    if self._last[0] != step:
      self._last = (step, [])
    if request not in self._last[1]:
      self._last[1].append(request)
      self.waiting.append(request)

  def ready(
    self, policy: PolicyState, state: TrainState, step: int, *, pause: bool
  ) -> Ready | None:
    """The first whose turn it is.

    Args:
      policy: says what was before.
      state: says which experts there are; read at a pause only.
      step: now.
      pause: whether the loop waits anyway, as before a checkpoint.
    """
    for place, request in enumerate(self.waiting):
      if pause or request.cause == "comparison" or not request.action.at_pause:
        try:
          request.action.check(self._cfg, step)
          action = request.action.fill(Now(self._cfg, step, policy, state))
        except ValueError as error:
          return Ready(place, request, str(error))
        return Ready(place, request._replace(action=action))
    return None
