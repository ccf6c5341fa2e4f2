"""The host side: gathers what steps report, looks at it every interval, does what the policy says.

Nothing here waits for the device while it trains: a look at step t reads the interval before the
last, whose numbers have long arrived, and starts the probe that the next look reads. Only at a
checkpoint, where the loop waits anyway, is everything read.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import jax
import numpy as np
from absl import logging

from ats_jax.config.build import CHANGES
from ats_jax.data.batch import Batch
from ats_jax.metrics.clock import Clock, Totals
from ats_jax.metrics.transfer import start_copy
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions.base import Action, Settings
from ats_jax.orchestrator.policy.decide import Interval, Terms, Tried, decide
from ats_jax.orchestrator.policy.growth import SPAN
from ats_jax.orchestrator.policy.requests import Ready, Requests
from ats_jax.orchestrator.policy.state import Decision, Judgement, PolicyState, Request
from ats_jax.orchestrator.record.ledger import Ledger, check_agreement
from ats_jax.orchestrator.signals.experts import Experts
from ats_jax.orchestrator.signals.health import LEVELS, report
from ats_jax.orchestrator.signals.interval import Pending, Reading, check_probe, probe_loss, read
from ats_jax.orchestrator.trials.paired import Again, Ahead, Update, look_ahead
from ats_jax.orchestrator.trials.snapshots import Snapshots, local_bytes
from ats_jax.paths import Path
from ats_jax.step.metrics import StepMetrics, check_finite, metric_names
from ats_jax.step.program import Program
from ats_jax.step.state import TrainState

Write = Callable[[int, Mapping[str, float]], None]
# Gives the newest checkpoint as `CheckpointManager.restore_latest` does: step, state and the rest.
Restore = Callable[[], tuple[int, TrainState, Any] | None]
# Where a checkpoint keeps what the policy remembers, and what hooks asked for.
SAVED, WAITING = "orchestrator", "requests"


class Loop(Protocol):
  """What the training loop lends; what is lent is asked for when it is needed."""

  def position(self) -> Mapping[str, Any]:
    """What a checkpoint of the state would hold beside it and what the supervisor has `saved`."""
    ...

  def again(self) -> Update:
    """What makes the last update once more, from another state."""
    ...

  def ahead(self) -> Ahead:
    """What makes the updates that come next, on batches that the loop will read again."""
    ...


class NoSupervisor:
  """Nobody watches (`orchestrator.mode=off`); only weights that are not finite are not saved."""

  wants_checkpoint = wants_restart = False
  decisions: tuple[tuple[int, Decision], ...] = ()
  replayed = 0

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    pass

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """See `Supervisor.start`."""

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """See `Supervisor.follow`."""

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, as it is."""
    del step, metrics
    return state

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, as it is.

    Raises:
      FloatingPointError: if its weights are not finite.
    """
    check_finite(step, metrics)
    return state

  def saved(self) -> dict[str, Any]:
    """Nothing to keep."""
    return {}


class Supervisor:
  """One run's supervisor.

  Attributes:
    policy: what it remembers.
    decisions: those of this process, with the steps at which they were taken.
    wants_checkpoint: an action needs one now.
    wants_restart: the checkpoint that was just saved is to be gone on from, with other settings.
    replayed: steps that were made again on branches.
  """

  def __init__(
    self,
    program: Program,
    probe: Batch | None = None,
    ledger: Path | None = None,
    write: Write | None = None,
    restore: Restore | None = None,
    totals: Totals | None = None,
    snapshots: Snapshots | None = None,
    loop: Loop | None = None,
  ):
    """Set what it works with; `start` begins.

    Args:
      program: the run; its config says what may be done.
      probe: a batch [rows, seq] on the mesh that is not trained on; without one, a fault of the
        data cannot be told from one of the state, and only what is not finite is rolled back.
      ledger: where decisions are written, by the first process.
      write: takes a few metrics at each look.
      restore: gives the last checkpoint, for a rollback without snapshots.
      totals: says where the time of this process went, see `Clock`.
      snapshots: where to keep states, if they are to outlive it.
      loop: lends what branches need; without one none are tried.
    """
    self.policy, self.decisions = PolicyState(), list[tuple[int, Decision]]()
    self.wants_checkpoint = self.wants_restart = False
    self._requests = Requests(program.cfg)
    self._settings = dict[str, tuple[Any, Any]]()  # name -> first value, value now
    self.replayed = 0
    self._program, self._cfg, self._probe = program, program.cfg.orchestrator, probe
    self._names = metric_names(program.cfg, program.objective.names)
    self._terms = Terms.of(program.cfg)
    self._write, self._restore, self._loop = write, restore, loop
    self._rows: list[jax.Array] = []
    self._loads: list[jax.Array] = []
    self._experts: Experts | None = None
    self._pending: Pending | None = None
    self._clock, self._restored_step = Clock(totals), -1
    self._norm = (-1, math.nan)  # of the weights after a step: of the last row that was read
    self._changed_step = -1  # after which the state was replaced or edited
    self._tries: Action | None = None  # what is to be tried when the next steps begin
    self._again: Again | None = None
    self._snapshots = snapshots or Snapshots.of(self._cfg)
    self._ledger = Ledger(ledger) if ledger is not None and jax.process_index() == 0 else None

  @property
  def acts(self) -> bool:
    """Whether it may change the run."""
    return self._cfg.mode == "act"

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """Begin before the update after `step`.

    Args:
      step: updates done; 0 in a new run.
      state: the new or restored one, which is taken to be good.
      saved: what the checkpoint that is resumed holds beside the state; see `saved`.

    Raises:
      ValueError: if the probe holds no token.
    """
    if saved and SAVED in saved:
      self.policy = PolicyState.from_json(saved[SAVED])
      self._requests = Requests(self._program.cfg, saved.get(WAITING, ()))
      self._settings = {name: (was, now) for name, (was, now) in saved.get(CHANGES, {}).items()}
    if step:
      self._note("resumed_from", step)
    self._note(
      "start", step, settings=dataclasses.asdict(self._cfg), bucket=self._terms.bucket,
      capacity=self._terms.capacity, accum_steps=self._program.cfg.step.accum_steps,
    )  # fmt: skip
    if self._probe is not None:  # compiled here, not in the middle of training
      check_probe(jax.device_get(self._eval(state.model, self._program.rules(step))))
    if self._program.cfg.moe.spare_experts:
      self._experts = Experts(self._program.cfg, state)
    if self.acts:
      self._snapshots.start(step, state, {**(saved or {}), **self._remembered()})
      gb = self._snapshots.copies * local_bytes(state) / 2**30
      where = f"snapshots in host memory, {gb:.3g} GB" if self._snapshots.good else (
        f"the last checkpoint and tries nothing: snapshots would take {gb:.3g} GB of host memory, "
        f"and orchestrator.snapshot_gb={self._cfg.snapshot_gb:g}"
      )  # fmt: skip
      logging.info("orchestrator: rolls back to %s", where)

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """Look at the model as `program` has it from update `step` on; compiles what that needs.

    Call where the train step is compiled too: when 8 bits are switched off, and as `mod.capacity`
    falls. Looks by other rules are not compared, see `decide`.

    Args:
      program: of the same run.
      step: 1-based.
      state: as it is before that update; only its shapes matter.
    """
    self._program = program
    if self._probe is not None:
      jax.block_until_ready(self._eval(state.model, program.rules(step)))

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Take in what update `step` returned; the state with which to go on.

    Args:
      step: updates done.
      state: as it returned it; not to be used any more.
      metrics: likewise.

    Raises:
      FloatingPointError: if the policy gives the run up.
    """
    start_copy(metrics.values)
    self._rows.append(metrics.values)
    if self._experts is not None:
      start_copy(metrics.layers["moe/load"])
      self._loads.append(metrics.layers["moe/load"])
    if self._again is not None and self._loop is not None:
      self._again.add(self._loop.again(), metrics)
    if step % self._cfg.check_interval:
      return state
    earlier, self._pending = self._pending, self._interval(step, state)
    if earlier is not None:
      state = self._look(step, state, earlier)
    if self._loop is not None:
      state = self._try_again(step, state)
    if self.acts and step > self.policy.acted_step:
      position = {} if self._loop is None else self._loop.position()
      self._snapshots.offer(step, state, {**position, **self._remembered()})
    return state

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Look at all that there is, waiting for it: before a checkpoint, which must be sound.

    Args:
      step: updates done.
      state: what the last one left.
      metrics: likewise.

    Raises:
      FloatingPointError: if weights are not finite and nothing mends them.
    """
    intervals = [self._pending, self._interval(step, state) if self._rows else None]
    self._pending = None
    for interval in intervals:
      if interval is not None:
        state = self._look(step, state, interval, pause=True)
    if self._restored_step != step:  # else these are the metrics of what was replaced
      check_finite(step, metrics)
    if self._loop is not None and self._may_try(step):
      state = self._try_ahead(step, state, self._loop.ahead())
    return state

  def saved(self) -> dict[str, Any]:
    """What to keep with a checkpoint, right after `settle`; JSON values."""
    self.wants_checkpoint = False
    if self._ledger is not None:
      self._ledger.flush()
    return self._remembered()

  def _remembered(self) -> dict[str, Any]:
    return {
      SAVED: self.policy.to_json(),
      WAITING: self._requests.to_json(),
      CHANGES: self._settings,
    }

  def close(self) -> None:
    """Make the ledger durable."""
    if self._ledger is not None:
      self._ledger.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _interval(self, step: int, state: TrainState) -> Pending:
    rows, loads, self._rows, self._loads = self._rows, self._loads, [], []
    probe, rules = None, self._program.rules(step)
    if self._probe is not None:
      probe = self._eval(state.model, rules)
      start_copy(probe)
    return Pending(step, rows, probe, rules, self._clock.lap(len(rows)), loads)

  def _eval(self, model: Decoder, rules: Pass) -> jax.Array:
    assert self._probe is not None
    return self._program.eval_step(model, self._probe, rules)

  def _look(
    self, step: int, state: TrainState, interval: Pending, *, pause: bool = False
  ) -> TrainState:
    """Conclude from an interval, act, and tell everybody."""
    rows = np.stack(jax.device_get(interval.rows))
    probe = None if interval.probe is None else probe_loss(jax.device_get(interval.probe))
    at, norm = self._norm
    is_next = interval.step - len(rows) == at != self._changed_step
    reading = read(self._names, interval.step, rows, probe, norm if is_next else None)
    if probe is not None:
      reading = reading._replace(rules=dataclasses.astuple(interval.rules))
    self._norm = interval.step, float(rows[-1, self._names.index("train/param_norm")])
    if self._experts is not None:
      reading = reading._replace(starved=self._experts.starved(jax.device_get(interval.loads)))
    ready = self._ready(step, state, pause=pause)
    request = None if ready is None else ready.request
    seen = Interval(reading, pause, request)
    self.policy, judgement = decide(self._terms, self.policy, seen, step)
    check_agreement(self.policy, reading, judgement.decisions, self._requests.to_json())
    health = report({**reading.means, **interval.host}, reading.nonfinite, judgement.finding)
    self._note(
      "check", step, reading=reading._asdict(), stale=judgement.stale, health=health._asdict(),
      host=interval.host, pause=pause, request=None if request is None else request.to_json(),
    )  # fmt: skip
    if health.level != "healthy" and not judgement.stale:
      logging.warning("health: %s: %s", health.level, "; ".join(health.causes))
    if judgement.outcome is not None:
      self._note("outcome", step, **judgement.outcome._asdict())
      logging.info("orchestrator: decision %d %s (held-out loss %+.4g, then %+.4g, from when all "
        "was well)", judgement.outcome.id, judgement.outcome.verdict, judgement.outcome.before,
        judgement.outcome.after)  # fmt: skip
    if not judgement.stale:
      if judgement.good:
        self._snapshots.confirm(reading.first)
      else:
        self._snapshots.reject()
    for decision in judgement.decisions:
      if ready is not None and decision.action is ready.request.action:
        del self._requests.waiting[ready.place]
      self.decisions.append((step, decision))
      state = self._carry_out(step, state, decision)
    if self.policy.trial is None:
      self._snapshots.forget()
    self._tries = judgement.tries
    if judgement.finding or judgement.decisions:
      self._again = None
    self._report(step, reading, judgement, LEVELS.index(health.level))
    is_over = step >= self._program.cfg.num_steps
    if judgement.asks is not None and not self._requests.waiting and not is_over:
      self._requests.add(judgement.asks, step)
    for asked in hooks.call(hooks.Look(step, reading, health, judgement)):
      is_try = isinstance(asked, hooks.Try)
      self._requests.add(Request(asked.action, "trial") if is_try else Request(asked), step)
    return state

  def _ready(self, step: int, state: TrainState, *, pause: bool) -> Ready | None:
    """The request whose turn it is; one that turns out impossible is dropped, and said so."""
    if self.wants_restart:
      return None
    ready = self._requests.ready(self.policy, state, step, pause=pause)
    if ready is None or not ready.refusal:
      return ready
    del self._requests.waiting[ready.place]
    self._refuse(step, ready)
    return None

  def _refuse(self, step: int, ready: Ready) -> None:
    self._note("refused", step, ready.request.action, reason=ready.refusal)
    logging.warning("orchestrator: what a hook asked for is not possible: %s", ready.refusal)

  def _carry_out(self, step: int, state: TrainState, decision: Decision) -> TrainState:
    action, saved, came_to = decision.action, None, {}
    if self.acts:
      saved, came_to = action.find(self, step, state)
    applied = self.acts and not (action.needs_saved and saved is None)
    self._note(
      "decision", step, action, id=decision.id, cause=decision.cause,
      confidence=decision.confidence, reason=decision.reason, applied=applied, **came_to,
    )  # fmt: skip
    logging.warning(
      "orchestrator: step %d: %s%s%s: %s (%s, confidence %.2f)", step, action,
      "".join(f" {k}={v}" for k, v in came_to.items()), "" if applied else " (not applied)",
      decision.reason, decision.cause, decision.confidence,
    )  # fmt: skip
    if not applied:
      return state
    action.check(self._program.cfg)
    action.tell(self, step, decision.reason)
    changed = action.apply(state, self._program.cfg, saved)
    if changed is not state:
      self._changed_step = step
    if saved is not None:
      self._restored_step = step
    if self._experts is not None and action.edits:
      self._experts = Experts(self._program.cfg, changed)
    return changed

  def restart_with(self, settings: Settings, before: Settings) -> None:
    """Have the run go on with other settings, from a checkpoint that it saves now."""
    was = dict(before)
    for name, now in settings:
      began, _ = self._settings.pop(name, (was[name], None))
      if now != began:
        self._settings[name] = (began, now)
    self.wants_checkpoint = self.wants_restart = True

  def _may_try(self, step: int) -> bool:
    """Whether there is time and peace for a branch."""
    policy, is_over = self.policy, step == self._program.cfg.num_steps
    healthy = policy.healthy > 0 and policy.trial is None and not policy.latched
    able = self._cfg.branch_steps > 0 and self._probe is not None and self._snapshots.good
    has_won = any(request.cause == "branch" for request in self._requests.waiting)
    return bool(able) and healthy and not (is_over or has_won or self.wants_restart)

  def _try_ahead(self, step: int, state: TrainState, ahead: Ahead) -> TrainState:
    """Try what a hook wants tried, on the batches that come next; ask for it if it wins."""
    ready = self._requests.ready(self.policy, state, step, pause=True, trial=True)
    if ready is None:
      return state
    del self._requests.waiting[ready.place]
    if ready.refusal:
      self._refuse(step, ready)
      return state
    action, rules = ready.request.action, self._program.rules(step)
    probe = lambda model: self._eval(model, rules)
    state, effect = look_ahead(self._program.cfg, state, action, ahead, probe)
    judgement = self._decide_trial(step, Tried(action, effect, again=False), first=step)
    if judgement.asks is not None:
      self._requests.add(judgement.asks, step)
    return state

  def _try_again(self, step: int, state: TrainState) -> TrainState:
    """Begin to remember steps that the policy wants tried otherwise, or make them again."""
    pending, again = self._pending, self._again
    assert pending is not None, "no interval ends here"
    if again is None:
      if self._tries is not None and self._probe is not None and self._snapshots.good:
        self._again = Again(step, state, self._tries, pending.probe, pending.rules)
        self._tries = None
      return state
    if again.rules != pending.rules:
      self._again = None  # its beginning and its end are losses of two models
      return state
    if step < again.first + SPAN * self._cfg.check_interval:
      return state
    self._again = None
    probe = lambda model: self._eval(model, again.rules)
    left, other, effect = again.make(self._program.cfg, state, probe)
    self.replayed += step - again.first
    self._clock.lap(step - again.first)  # is no slow training
    judgement = self._decide_trial(step, Tried(again.action, effect, again=True), again.first)
    if not judgement.decisions:
      del other  # there is memory for one
      return left.restore(state)
    self._snapshots.reject()
    for decision in judgement.decisions:
      self.decisions.append((step, decision))
      other = self._carry_out(step, other, decision)
    return other

  def _decide_trial(self, step: int, tried: Tried, first: int) -> Judgement:
    """Write down what came of a trial, and what is to be done about it."""
    self._note(
      "trial", step, tried.action, again=tried.again, first=first, **tried.effect._asdict()
    )
    self.policy, judgement = decide(self._terms, self.policy, tried, step)
    won = bool(judgement.decisions or judgement.asks)
    logging.info("orchestrator: step %d: tried %s on the steps from %d on: %s, %s", step,
      tried.action, first, tried.effect, "won" if won else "lost")  # fmt: skip
    return judgement

  def earlier(
    self, step: int, state: TrainState, back: int, *, returns: bool
  ) -> tuple[TrainState | None, dict[str, Any]]:
    """The state to go back to, and the step that made it; see `Rollback`."""
    ring = self._snapshots
    snapshot = ring.left if returns else ring.back(back)
    if snapshot is not None:
      earlier = snapshot.restore(state)
      ring.leave(step, state)
      return earlier, {"to": snapshot.step}
    if returns or self._restore is None or (found := self._restore()) is None:
      return None, {}
    to, earlier, _ = found
    return earlier, {"to": to}

  def _report(self, step: int, reading: Reading, judgement: Judgement, level: int) -> None:
    if self._write is None:
      return
    seen = {} if np.isnan(reading.probe) else {"orchestrator/probe_loss": reading.probe}
    self._write(step, {
      "orchestrator/health": level,
      "orchestrator/lr_scale": self.policy.lr_scale,
      "orchestrator/decisions": self.policy.decisions,
      "orchestrator/confidence": judgement.finding.confidence if judgement.finding else 0.0,
      **seen,
    })  # fmt: skip

  def _note(self, kind: str, step: int, action: Action | None = None, **fields: Any) -> None:
    if self._ledger is not None:
      self._ledger.write(kind, step, action, **fields)
