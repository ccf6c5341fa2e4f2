"""What hooks ask for: kept until its turn, checked again before it is done."""

from collections.abc import Iterable, Mapping
from typing import Any

from ats_jax.config.schema import Config
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions.base import Action, Now
from ats_jax.orchestrator.policy.decide import Terms
from ats_jax.orchestrator.policy.state import TRIED, Judgement, PolicyState, Request
from ats_jax.orchestrator.policy.triggers import HOOK
from ats_jax.orchestrator.record.teller import Teller
from ats_jax.step.state import TrainState


class Requests:
  """The queue of a run.

  Attributes:
    waiting: first come, first served, but experts are edited at a checkpoint only.
    tried: what is compared now; None = nothing that a hook wants tried.
  """

  def __init__(self, cfg: Config, teller: Teller, waiting: Iterable[Mapping[str, Any]] = ()):
    """Go on with what `to_json` gave."""
    self._cfg, self._teller = cfg, teller
    self._last: tuple[int, list[Request]] = (-1, [])  # of the last step with requests
    self._turn: Request | None = None  # of the queue, as `ready` found it
    self._told = list[Request]()  # of which it was said that they wait
    self.waiting, self.tried = [Request.from_json(fields) for fields in waiting], None

  def to_json(self) -> list[dict[str, Any]]:
    """Return the fields as JSON values."""
    tried = [] if self.tried is None else [self.tried]
    return [request.to_json() for request in (*tried, *self.waiting)]

  def check(self, wanted: Action | hooks.Try, step: int) -> Request:
    """The request for it, if this run can ever do it after `step`.

    Raises:
      ValueError: if not.
    """
    is_tried = isinstance(wanted, hooks.Try)
    action = wanted.action if is_tried else wanted
    if not action.can_be_asked_for:
      raise ValueError(f"{action} is not for hooks to ask for.")
    if is_tried and not action.can_be_tried:
      raise ValueError(f"{action} cannot be compared on the next steps. Ask for it without Try.")
    action.check(self._cfg, step)
    return Request(action, TRIED) if is_tried else Request(action)

  def add(self, wanted: Action | hooks.Try, step: int) -> None:
    """Take it in; once, though before a checkpoint there may be several looks at one step.

    Raises:
      ValueError: if this run can never do it.
    """
    self.queue(self.check(wanted, step), step)

  def queue(self, request: Request, step: int) -> None:
    """Take in a request of `step`, once."""
    if self._last[0] != step:
      self._last = (step, [])
    if request not in self._last[1]:
      self._last[1].append(request)
      self.waiting.append(request)

  def ready(
    self, terms: Terms, policy: PolicyState, state: TrainState, step: int, *, pause: bool
  ) -> Request | None:
    """The first whose turn it is, with all that it left open filled in.

    One that turns out impossible is dropped, and said so.

    Args:
      terms: whether there may be comparisons.
      policy: says what was before.
      state: says which experts there are; read at a pause only.
      step: now.
      pause: whether the loop waits anyway, as before a checkpoint.
    """
    turns = (x for x in self.waiting if pause or x.cause == TRIED or not x.action.at_pause)
    self._turn = asked = next(turns, None)
    if asked is None:
      return None
    action, refusal = asked.action, ""
    try:
      action.check(self._cfg, step)
      action = action.fill(Now(self._cfg, step, policy, state))
    except ValueError as error:
      refusal = str(error)
    if asked.cause == TRIED and not terms.may_compare(policy):
      lacks = (
        "there is no memory or time left for that (orchestrator.snapshot_gb, "
        "orchestrator.compare_share)"
        if terms.cfg.mode == "act" else "orchestrator.mode=observe only observes"
      )  # fmt: skip
      refusal = f"{action} is to be compared, and {lacks}"
    if not refusal:
      return asked._replace(action=action)
    self.waiting.remove(asked)
    self._teller.refused(step, action, refusal)
    return None

  def answer(self, request: Request, judgement: Judgement, step: int, *, busy: bool) -> None:
    """Take it from the queue if it is done or compared now; else it is said once that it waits.

    Args:
      request: what `ready` returned last.
      judgement: of the look.
      step: now.
      busy: whether a comparison is going on, or begins.
    """
    waits, proposal = self._turn, judgement.proposal
    assert waits is not None, "it is of the queue"
    is_done = any(decision.action is request.action for decision in judgement.decisions)
    if request.cause == TRIED:
      is_done = proposal is not None and proposal.trigger == HOOK
      self.tried = request if is_done else self.tried
    if is_done:
      self.waiting.remove(waits)
      return
    if judgement.stale or waits in self._told:
      return
    self._told.append(waits)
    if busy:
      reason = "a comparison is going on"
    elif judgement.finding is not None or not judgement.good:
      reason = "this look found something wrong"
    else:
      reason = "something else comes first, or comparisons rest after one that going on won"
    self._teller.waits(step, waits, reason)

  def end(self, step: int) -> None:
    """The run ends: nothing that hooks asked for or would have asked for later is done any more."""
    tried = [] if self.tried is None else [self.tried]
    later = [self.check(hook.wanted, step) for hook in hooks.scheduled(step)]
    for request in (*tried, *self.waiting, *later):
      self._teller.refused(step, request.action, f"{request.action} comes after the run's end")
    self.waiting, self.tried = [], None
