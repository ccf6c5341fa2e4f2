"""Who watches a run: nobody, a guard of the host, or the orchestrator's supervisor."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.step.state import StepMetrics, TrainState
from lab.faults.guards import Guard

EVERY = 10  # steps between two copies of the state, and between two losses of the probe
KEPT, BACK = 120, 20  # steps that copies are old, at most, and that a rollback goes back, at least
CALLED = {"Rollback": "rollback", "SetLearningRateScale": "rate"}

copied = jax.jit(lambda tree: jax.tree.map(lambda x: x.copy(), tree))  # a step donates its state


class Log(NamedTuple):
  """What a run did: lists, of which the first two have an entry for each step that was made."""

  rows: list[jax.Array]  # `StepMetrics.values`
  left_out: list[bool]  # whether a guard of the host took it back
  actions: list[tuple[int, str, Any]]  # step, what, detail; docs/lab/faults.md
  looks: list[tuple[int, str]]  # of the supervisor: step, finding; "" without one
  causes: list[tuple[int, str]]  # of worse health than usual: step, name
  stops: list[int]  # steps after which it went on from a checkpoint, or ended

  def fork(self) -> "Log":
    """Of a run that goes on from here on its own."""
    return Log(*(list(x) for x in self))


def at_step(state: TrainState, step: int) -> TrainState:
  """`state` as that of `step`: batches since it was taken are lost."""
  return dataclasses.replace(state, step=jnp.full_like(state.step, step))


# Makes the last update again, from the state before it.
Again = Callable[[TrainState], tuple[TrainState, StepMetrics]]


class _Keeper:
  """Gets each step of a run and gives the state to go on with. This one does nothing."""

  rate = 1.0  # what the schedule's is multiplied by

  def start(self, step: int, state: TrainState, saved: Any) -> None: ...

  def before(self, state: TrainState) -> None: ...  # a step, which donates the state

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    return state

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    return state  # before a checkpoint

  def saved(self) -> Any: ...  # what another one goes on from

  def close(self) -> None: ...


class _Host(_Keeper):
  def __init__(self, guard: Guard, look: Callable[[TrainState], float], again: Again, log: Log):
    self._guard, self._look, self._again, self._log = guard, look, again, log
    self._copies: list[Snapshot] = []
    self._last: Any = None

  def start(self, step: int, state: TrainState, saved: Any) -> None:
    guard, copies, self.rate = saved or (self._guard, [Snapshot.take(step, state)], 1.0)
    self._guard, self._copies = copy.deepcopy(guard), list(copies)

  def saved(self) -> Any:
    return copy.deepcopy(self._guard), list(self._copies), self.rate

  def before(self, state: TrainState) -> None:
    self._last = copied(state)

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    row, log = metrics.on_host(), self._log
    self._guard.observe(step, row, None if step % EVERY else self._look(state))
    decision = self._guard.decide()
    what, amount = decision if isinstance(decision, tuple) else (decision, BACK)
    log.left_out.append(what == "skip")
    if what == "skip":
      return at_step(self._last, step)
    if what == "repeat":
      return self._again(self._last)[0]
    if what == "rollback":
      self._copies = [x for x in self._copies if x.step <= step - amount] or self._copies[:1]
      log.actions.append((step, "rollback", self._copies[-1].step))
      return at_step(self._copies[-1].resume(), step)
    if what == "rate":
      log.actions.extend([(step, "rate", amount)] if amount != self.rate else [])
      self.rate = amount
    elif what != "continue":
      raise ValueError(f"{type(self._guard).__name__}.decide() returned {decision!r}.")
    if step % EVERY == 0 and math.isfinite(row["train/param_norm"]):
      recent = [x for x in self._copies if x.step >= step - KEPT]
      self._copies = [*(recent or self._copies[-1:]), Snapshot.take(step, state)]
    return state


class _Watched(_Keeper):
  def __init__(self, supervisor: Supervisor, log: Log):
    self._supervisor, self._log, self._told = supervisor, log, 0
    hooks.register(self._note)

  def _note(self, look: hooks.Look) -> None:
    finding = look.judgement.finding
    self._log.looks.append((look.step, finding.reason if finding is not None else ""))
    self._log.causes.extend((look.step, name) for name in look.health.names)

  def start(self, step: int, state: TrainState, saved: Any) -> None:
    self._supervisor.start(step, state, saved or {})

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    return self._tell(self._supervisor.after(step, state, metrics))

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    return self._tell(self._supervisor.settle(step, state, metrics))

  def _tell(self, state: TrainState) -> TrainState:
    new = self._supervisor.decisions[self._told :] if self._supervisor.acts else ()
    for step, decision in new:
      fields = decision.action.to_json()
      name = fields.pop("action")
      self._log.actions.append((step, CALLED.get(name, name), fields.get("scale", fields)))
    self._told += len(new)
    return state

  def saved(self) -> Any:
    return dict(self._supervisor.saved())

  def close(self) -> None:
    hooks.unregister(self._note)


def keeper(
  log: Log,
  guard: Callable[[], Guard] | None = None,
  look: Callable[[TrainState], float] = lambda state: math.nan,
  again: Again | None = None,
  supervisor: Callable[[], Supervisor] | None = None,
) -> _Keeper:
  """Whoever watches, and notes in `log` what it does; `look` scores the probe for a guard."""
  if guard is not None:
    assert again is not None
    return _Host(guard(), look, again, log)
  return _Keeper() if supervisor is None else _Watched(supervisor(), log)
