"""Code of the user that is called at each look of the supervisor, and may ask for an action.

A config file is Python, so it is the place to register one, without touching the loop:

  from ats_jax.orchestrator import actions, hooks

  @hooks.register
  def tell_me(look: hooks.Look) -> None:
    if look.health.level == "critical":
      send_mail(look.step, look.health.causes)

  hooks.at(9000, actions.SetWeightDecay(0.5))
"""

from collections.abc import Callable
from typing import NamedTuple

from ats_jax.orchestrator.actions import Action
from ats_jax.orchestrator.policy.state import Judgement
from ats_jax.orchestrator.signals.health import Health
from ats_jax.orchestrator.signals.interval import Reading


class Look(NamedTuple):
  """What a hook is told.

  Attributes:
    step: the newest step; those of the reading are an interval older.
    since: the step of the look before, or the one from which the run was resumed.
    reading: what was seen.
    health: how that is.
    judgement: what was concluded; its decisions are applied before hooks are called.
  """

  step: int
  since: int
  reading: Reading
  health: Health
  judgement: Judgement


class Try(NamedTuple):
  """An action to be done only if it wins a comparison with the run's own next steps.

  Attributes:
    action: on the state, not the settings.
  """

  action: Action


class At(NamedTuple):
  """The hook of `at`."""

  step: int
  wanted: Action | Try

  def __call__(self, look: Look) -> Action | Try | None:
    """Ask at the first look at its step or later."""
    return self.wanted if look.since < self.step <= look.step else None


Hook = Callable[[Look], Action | Try | None]
_registered: list[Hook] = []


def register(hook: Hook) -> Hook:
  """Have `hook` called at each look, in every process; what it raises ends the run.

  An action that it returns, the same in every process, is done at one of the next looks that find
  nothing wrong (docs/guides/orchestrator.md).
  """
  _registered.append(hook)
  return hook


def at(step: int, wanted: Action | Try) -> Hook:
  """Ask for something once, at the first look at `step` or later; a resumed run does not repeat it.

  Looks are at multiples of `orchestrator.check_interval`, and before checkpoints. What a run can
  never do ends it at its start.

  Raises:
    ValueError: if no look is at that step.
  """
  if step < 1:
    raise ValueError(f"hooks.at(step={step}): looks are after an update; use a step from 1 on.")
  return register(At(step, wanted))


def scheduled(after: int) -> list[At]:
  """Those of `at` whose step is later than `after`."""
  return [hook for hook in _registered if isinstance(hook, At) and hook.step > after]


def number() -> int:
  """How many hooks are registered."""
  return len(_registered)


def unregister(hook: Hook) -> None:
  """Take back `register`."""
  _registered.remove(hook)


def call(look: Look) -> list[Action | Try]:
  """Call them all, in the order of registration; returns what they ask for."""
  asked = [hook(look) for hook in tuple(_registered)]
  return [action for action in asked if action is not None]
