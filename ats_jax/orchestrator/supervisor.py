"""The host side: gathers what steps report, looks at it every interval, does what the policy says.

Nothing here waits for the device while it trains: a look at step t reads the interval before the
last, whose numbers have long arrived, and may start the probe that the next look reads. Only at a
checkpoint, where the loop waits anyway, is everything read.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from absl import logging

from ats_jax.config.build import CHANGES
from ats_jax.data.batch import Batch
from ats_jax.metrics.clock import Clock, Totals
from ats_jax.metrics.host_copy import start_copy
from ats_jax.metrics.watcher import Watcher
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import trainable
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions.base import Action, Settings, carry_out
from ats_jax.orchestrator.constants import LEAST_MARGIN, SPAN_LOOKS
from ats_jax.orchestrator.policy.decide import Compared, Interval, Terms, decide
from ats_jax.orchestrator.policy.requests import Ready, Requests
from ats_jax.orchestrator.policy.state import Decision, Judgement, PolicyState, Request
from ats_jax.orchestrator.policy.triggers import HOOK
from ats_jax.orchestrator.ports import Loop, rows_read
from ats_jax.orchestrator.record.influence import (
  bounded_steps,
  cost_of_lost_steps,
  scale_changes,
)
from ats_jax.orchestrator.record.ledger import check_agreement
from ats_jax.orchestrator.record.teller import Teller, Write
from ats_jax.orchestrator.signals.copies import Copies
from ats_jax.orchestrator.signals.counts import Schedule, wrong_counts, wrong_position
from ats_jax.orchestrator.signals.experts import OpenExperts
from ats_jax.orchestrator.signals.health import (
  COMPARED,
  REMEMBERED_LOOKS,
  Cause,
  far_probe,
  grown_logits,
  health_of,
  risen,
)
from ats_jax.orchestrator.signals.interval import (
  Fault,
  Pending,
  RowsRead,
  Sums,
  probe_sums,
  sum_up,
)
from ats_jax.orchestrator.signals.probe import Probe
from ats_jax.orchestrator.signals.sources import Rise, where
from ats_jax.orchestrator.trials.arms import Proposal
from ats_jax.orchestrator.trials.compare import Comparison, Means
from ats_jax.orchestrator.trials.snapshots import (
  COPIES,
  COPIES_OF_COMPARISON,
  Snapshots,
  local_bytes,
)
from ats_jax.step import tensors
from ats_jax.step.program import Program
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import StepMetrics, TrainState, check_finite
from ats_jax.store.paths import Path

# Gives the newest checkpoint as `CheckpointManager.restore_latest` does: step, state and the rest.
Restore = Callable[[], tuple[int, TrainState, Any] | None]
# Keys of the supervisor's part of a checkpoint.
SAVED = "orchestrator"  # what the policy remembers
WAITING = "requests"  # what hooks asked for
EVALUATED = "evaluated"  # losses of evaluations that no look has seen


class Supervisor(Watcher):
  """Watches one run: it looks at the metrics of its steps, decides on actions and carries them out.

  Attributes:
    policy: the state of the policy, which each checkpoint keeps.
    decisions: the decisions of this process, each with the step at which it was taken.
    wants_checkpoint: whether an action needs a checkpoint now.
    wants_restart: whether the run is to be reopened from the checkpoint just saved, as an action
      changed its settings.
    made_again: updates that comparisons have made, in this process.
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
    schedule: Schedule | None = learning_rate,
    domains: Sequence[str] = (),
  ):
    """Set up the supervisor of a run; `start` begins.

    Args:
      program: the program of the run; its config says which actions are allowed.
      probe: a held-out batch on the mesh (`Probe`). Without one, a fault of the data cannot be told
        from one of the state, and a rollback happens only for values that are not finite.
      ledger: the file of decisions, which process 0 writes; None = none.
      write: writes a few metrics at each look.
      restore: returns the last checkpoint, for a rollback without snapshots.
      totals: returns the time of this process by what it was spent on (`Clock`).
      snapshots: keeps states in host memory and outlives the supervisor; None = it makes its own.
      loop: the training loop, which makes updates again; without it nothing is compared.
      schedule: returns the learning rate that a step must report; None = it is not checked.
      domains: of each part of `probe` the name of its kind of text.
    """
    self.policy, self.decisions = PolicyState(), list[tuple[int, Decision]]()
    self.wants_checkpoint = self.wants_restart = False
    self._requests = Requests(program.cfg)
    self._tried: Request | None = None  # what a hook wants tried, until its comparison has ended
    self._waits = list[Request]()  # of which it was said that they wait
    self._evaluated = list[float]()  # since the last look
    self._settings = dict[str, tuple[Any, Any]]()  # name -> first value, value now
    self.made_again = 0
    self._program, self._cfg = program, program.cfg.orchestrator
    self._probe = None if probe is None else Probe(probe, domains)
    self._names: tuple[str, ...] = ()  # of the step's metrics, as they came with the last
    self._terms, self._last_step = Terms.of(program.cfg), program.cfg.num_steps
    self._teller = Teller(ledger, write)
    self._restore, self._loop, self._schedule = restore, loop, schedule
    self._begin: RowsRead | None = None
    self._rows: list[jax.Array] = []
    self._loads: list[jax.Array] = []
    self._experts: OpenExperts | None = None
    self._tensors: list[str] = []
    self._copies: Copies | None = None
    self._pending: Pending | None = None
    self._clock, self._restored_step = Clock(totals), -1
    self._laps, self._readings = list[dict[str, float]](), 0
    self._proposal: Proposal | None = None  # of the last look
    self._comparison: Comparison | None = None
    self._span = SPAN_LOOKS * self._cfg.check_interval
    self._changed_step = 0  # after which something else than a step changed the state
    self._looked_step = 0  # of the last look
    self._snapshots = snapshots or Snapshots.of(self._cfg)

  @property
  def acts(self) -> bool:
    """Whether it may change the run."""
    return self._cfg.mode == "act"

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """Begin before the update after `step`.

    Args:
      step: updates done; 0 in a new run.
      state: the new or restored one, which is taken to be good.
      saved: what the checkpoint that is resumed holds beside the state (`saved`).

    Raises:
      ValueError: if the probe holds no token.
    """
    self._changed_step = self._looked_step = step
    if saved and SAVED in saved:
      self.policy = PolicyState.from_json(saved[SAVED])
      self._requests = Requests(self._program.cfg, saved.get(WAITING, ()))
      self._evaluated = [*saved.get(EVALUATED, ())]
      self._settings = {name: (was, now) for name, (was, now) in saved.get(CHANGES, {}).items()}
    for hook in hooks.scheduled(step):
      self._requests.check(_request(hook.wanted), step)
    if step:
      self._teller.note("resumed_from", step)
    has_room = self._snapshots.fits(state, COPIES_OF_COMPARISON)
    able = self.acts and has_room and self._loop is not None and self._probe is not None
    self._begin_terms(step, compares=able)
    self._tensors = tensors.names(self._program.cfg, trainable(state.model))
    self._copies = Copies(self._tensors)
    self._copies.begin(state.model)
    if self._probe is not None:  # compiled here, not in the middle of training
      self._probe.begin(self._program, state.model, self._program.rules(step))
      self._probe.logits(state.model, self._program.rules(step))
    self._begin = rows_read(self._loop, step)
    if self._program.cfg.moe.spare_experts:
      self._experts = OpenExperts(self._program.cfg, state)
    if self.acts:
      self._snapshots.start(
        step, state, {**(saved or {}), **self._position(), **self._remembered()}
      )
      self._snapshots.keeps_first = step == 0
      gb = COPIES * local_bytes(state) / 2**30
      where = f"snapshots in host memory, {gb:.3g} GB" if self._snapshots.good else (
        f"the last checkpoint, compares nothing: snapshots would take {gb:.3g} GB of host memory, "
        f"and orchestrator.snapshot_gb={self._cfg.snapshot_gb:g}"
      )  # fmt: skip
      logging.info("orchestrator: rolls back to %s", where)
      if self._snapshots.good and not has_room:
        logging.info("orchestrator: compares nothing, which takes five snapshots' memory")

  def _begin_terms(self, step: int, *, compares: bool) -> None:
    """Note the terms by which is decided from here on."""
    eight_bits = self._program.cfg.precision.fp8 and self._program.fp8
    self._terms = self._terms._replace(compares=compares, eight_bits=eight_bits)
    facts = {name: x for name, x in self._terms._asdict().items() if name != "cfg"}
    self._teller.note(
      "start", step, settings=dataclasses.asdict(self._cfg), **facts,
      accum_steps=self._program.cfg.step.accum_steps,
    )  # fmt: skip

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """Score the probe with `program` from update `step` on; compiles the scoring.

    Call it whenever the train step is compiled: when 8 bits are switched off, and as `mod.capacity`
    falls. Losses under other rules are not compared, see `decide`.

    Args:
      program: the new program of the same run.
      step: 1-based.
      state: the state before that update; only its shapes matter.
    """
    self._program = program
    if self._terms.eight_bits and not program.fp8:
      self._begin_terms(step - 1, compares=self._terms.compares)
    if self._probe is not None:
      jax.block_until_ready(self._probe.score(program, state.model, program.rules(step)))
      self._probe.logits(state.model, program.rules(step))

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Take in the results of update `step`; returns the state with which to go on.

    Args:
      step: updates done.
      state: the state after the step; not to be used any more.
      metrics: metrics of the step.

    Raises:
      FloatingPointError: if the policy gives the run up.
    """
    self._names = metrics.names
    start_copy(metrics.values)
    self._rows.append(metrics.values)
    if self._experts is not None:
      start_copy(metrics.layers["moe/load"])
      self._loads.append(metrics.layers["moe/load"])
    if self._comparison is not None:
      self._comparison.metrics.append(metrics)
    if step % self._cfg.check_interval:
      return state
    if self._pending is not None:
      state = self._look(step, state, self._pending)
    self._pending = self._interval(step, state)
    if self._comparison is not None and step >= self._comparison.first + self._span:
      state = self._end_comparison(step, state)
    elif self._proposal is not None:
      self._compare(step, state)
    if self.acts and step > self.policy.acted_step and self._comparison is None:
      self._snapshots.offer(step, state, {**self._position(), **self._remembered()})
    return state

  def _position(self) -> Mapping[str, Any]:
    return {} if self._loop is None else self._loop.position()

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Look at all steps so far, waiting for their numbers: a checkpoint must be sound.

    Args:
      step: updates done.
      state: the state after the last step.
      metrics: metrics of the last step.

    Raises:
      FloatingPointError: if weights are not finite and nothing mends them.
    """
    pending, self._pending = self._pending, None
    if self._rows:
      if pending is not None:
        state = self._look(step, state, pending, pause=True)
      pending = self._interval(step, state, pause=True)
    elif pending is not None and pending.probe is None and self._probe is not None:
      pending = pending._replace(probe=self._scorer(pending.rules)(state.model))
    if pending is not None and self._probe is not None:
      pending = pending._replace(again=self._scorer(pending.rules)(state.model))
    if pending is not None:
      state = self._look(step, state, pending, pause=True)
    if self._restored_step != step:  # else `metrics` are of the state that was replaced
      check_finite(step, metrics)
    if self._comparison is not None and step == self._terms.num_steps:
      state = self._end_comparison(step, state)
    if step >= self._last_step:
      self._refuse_the_rest(step)
    return state

  def evaluated(self, loss: float) -> None:
    """Take in the loss of an evaluation of the validation split; the next look sees it."""
    self._evaluated.append(loss)

  def saved(self) -> dict[str, Any]:
    """What to keep with a checkpoint, right after `settle`; JSON values."""
    self.wants_checkpoint = False
    self._teller.flush()
    return self._remembered()

  def _remembered(self) -> dict[str, Any]:
    tried = [] if self._tried is None else [self._tried.to_json()]
    return {
      SAVED: self.policy.to_json(),
      WAITING: [*tried, *self._requests.to_json()],
      EVALUATED: [*self._evaluated],
      CHANGES: self._settings,
    }

  def close(self) -> None:
    """Make the ledger durable."""
    self._teller.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _interval(self, step: int, state: TrainState, *, pause: bool = False) -> Pending:
    rows, loads, self._rows, self._loads = self._rows, self._loads, [], []
    rules, probe, logits = self._program.rules(step), None, None
    if self._probe is not None and (pause or step > self.policy.acted_step):
      probe = self._scorer(rules)(state.model)
      logits = self._probe.logits(state.model, rules)
    assert self._copies is not None, "it was started"
    copies = self._copies.begin(state.model)
    host = self._clock.lap(len(rows))
    return Pending(
      step,
      rows,
      probe,
      rules,
      host,
      loads,
      rows_read(self._loop, step),
      logits=logits,
      copies=copies,
    )

  def _scorer(self, rules: Pass) -> Callable[[Decoder], Sums]:
    probe = self._probe
    assert probe is not None
    return lambda model: probe.score(self._program, model, rules)

  def _look(
    self, step: int, state: TrainState, interval: Pending, *, pause: bool = False
  ) -> TrainState:
    """Conclude from an interval, act, and record both."""
    rows = np.stack(jax.device_get(interval.rows))
    held = None
    if self._probe is not None and interval.probe is not None:
      held = self._probe.losses(interval.probe)
    reading = sum_up(self._names, interval.step, rows, held, self._tensors)
    reading = reading._replace(faults=self._faults(interval, rows))
    reading = reading._replace(**_looked(interval))
    if self._probe is not None:
      reading = reading._replace(rules=dataclasses.astuple(interval.rules))
    if self._experts is not None:
      reading = reading._replace(starved=self._experts.starved(jax.device_get(interval.loads)))
    ready = self._ready(step, state, pause=pause)
    request = None if ready is None else ready.request
    seen, self._evaluated = Interval(reading, request, tuple(self._evaluated)), []
    self.policy, judgement = decide(self._terms, self.policy, seen, step)
    check_agreement(self.policy, reading._asdict(), judgement, self._requests.to_json())
    self._laps = [*self._laps, interval.host][-REMEMBERED_LOOKS:]
    self._readings += held is not None
    further = [*(far_probe(reading) if self._readings in COMPARED else ()), *risen(judgement.above)]
    further += grown_logits(reading.logits, self.policy.logits[1], self.policy.logits[0])
    further += [self._cause_of(rise, interval, rows) for rise in judgement.rises]
    means = {**reading.means, **reading.looked}
    health = health_of(means, reading.nonfinite, judgement.finding, self._laps, further)
    self._teller.note(
      "check", step, reading=reading._asdict(), stale=judgement.stale, health=health._asdict(),
      host=interval.host, request=None if request is None else request.to_json(),
      evaluated=seen.evaluated,
    )  # fmt: skip
    if (left := bounded_steps(self._names, interval.step, rows)) is not None:
      self._teller.bounded(step, left, interval.read, self._program.cfg.data.batch_size)
    if (scale := scale_changes(self._names, interval.step, rows)) is not None:
      self._teller.note("loss_scale", step, **scale)
    if not judgement.stale:
      self._teller.health(health)
      if not judgement.good:
        self._snapshots.reject()
      elif held is not None or self._probe is None:  # not by the training loss alone
        self._snapshots.confirm(reading.first)
    for decision in judgement.decisions:
      self.decisions.append((step, decision))
      state = self._carry_out(step, state, decision)
    self._proposal = judgement.proposal or self._proposal  # a pause may look twice
    if self._proposal is not None and self._proposal.at_once:
      self._compare(step, state)
      state = self._end_comparison(step, state)
    if ready is not None and _takes_up(judgement, ready.request):
      del self._requests.waiting[ready.place]
      self._tried = ready.request if ready.request.cause == "comparison" else self._tried
    elif ready is not None and not judgement.stale:
      self._say_that_it_waits(step, self._requests.waiting[ready.place], judgement)
    self._snapshots.keeps_first &= self.policy.start is not None or self._proposal is not None
    self._teller.metrics(step, reading, self.policy, health)
    is_over = step >= self._program.cfg.num_steps
    if judgement.asks is not None and not self._requests.waiting and not is_over:
      self._requests.add(judgement.asks, step)
    since, self._looked_step = self._looked_step, step
    for asked in hooks.call(hooks.Look(step, since, reading, health, judgement)):
      self._requests.add(_request(asked), step)
    return state

  def _faults(self, interval: Pending, rows: np.ndarray) -> tuple[Fault, ...]:
    """What is certainly wrong with an interval."""
    disagree = ()
    if self._probe is not None and interval.probe is not None and interval.again is not None:
      disagree = self._probe.disagreement(self._program, interval.probe, interval.again)
    assert self._copies is not None, "it was started"
    copies = self._copies.faults(interval.copies)
    counts = wrong_counts(self._program.cfg, self._schedule, self._names, interval.step, rows)
    elsewhere = wrong_position(self._program.cfg, self._begin, interval.read)
    return (*copies, *elsewhere, *disagree, *counts)

  def _cause_of(self, rise: Rise, interval: Pending, rows: np.ndarray) -> Cause:
    """What is said of a source whose training loss has risen."""
    at = ""
    if self._loop is not None and interval.read is not None:
      batch_size, origin = self._program.cfg.data.batch_size, self._loop.origin
      at = f"; {where(rise.source, self._names, rows, interval.read, batch_size, origin)}"
    return Cause(f"source {rise.source}", 1, rise.says + at)

  def _ready(self, step: int, state: TrainState, *, pause: bool) -> Ready | None:
    """The request whose turn it is; one that turns out impossible is dropped, and said so."""
    if self.wants_restart:
      return None
    ready = self._requests.ready(self.policy, state, step, pause=pause)
    if ready is None:
      return None
    refusal = ready.refusal
    if ready.request.cause == "comparison" and not self._terms.may_compare(self.policy):
      lacks = (
        "there is no memory or time left for that (orchestrator.snapshot_gb, "
        "orchestrator.compare_share)" if self.acts else "orchestrator.mode=observe only observes"
      )  # fmt: skip
      refusal = f"{ready.request.action} is to be compared, and {lacks}"
    if not refusal:
      return ready
    del self._requests.waiting[ready.place]
    self._teller.refused(step, ready.request.action, refusal)
    return None

  def _say_that_it_waits(self, step: int, request: Request, judgement: Judgement) -> None:
    """Once: in the ledger and the log."""
    if request in self._waits:
      return
    self._waits.append(request)
    if self._comparison is not None or self._proposal is not None:
      reason = "a comparison is going on"
    elif judgement.finding is not None or not judgement.good:
      reason = "this look found something wrong"
    else:
      reason = "something else comes first, or comparisons rest after one that going on won"
    self._teller.waits(step, request, reason)

  def _refuse_the_rest(self, step: int) -> None:
    """The run ends: nothing that hooks asked for or would have asked for later is done any more."""
    tried = [] if self._tried is None else [self._tried]
    later = [_request(hook.wanted) for hook in hooks.scheduled(step)]
    for request in (*tried, *self._requests.waiting, *later):
      self._teller.refused(step, request.action, f"{request.action} comes after the run's end")
    self._tried, self._requests.waiting = None, []

  def _carry_out(self, step: int, state: TrainState, decision: Decision) -> TrainState:
    action, saved, came_to = decision.action, None, {}
    if self.acts:
      saved, came_to = action.find(self, step, state)
    if saved is not None:
      saved = self._program.catch_up(saved, came_to["to"])
      came_to["lost"] = cost_of_lost_steps(self._program.cfg, step - came_to["to"], self._laps)
    applied = self.acts and not (action.needs_saved and saved is None)
    self._teller.decision(step, decision, came_to, applied=applied)
    if not applied:
      return state
    action.check(self._program.cfg)
    action.tell(self, step, decision.reason)
    changed = carry_out(action, state, self._program.cfg, saved)
    self._changed_step = step
    if self._comparison is not None:
      self._give_up(step, self._comparison, f"{action} comes before it")
    if saved is not None:
      self._restored_step = step
    if self._experts is not None and action.edits:
      self._experts = OpenExperts(self._program.cfg, changed)
    return changed

  def _give_up(self, step: int, comparison: Comparison, reason: str) -> None:
    """Drop a comparison under way."""
    self._teller.given_up(step, comparison.first, reason)
    self._comparison = self._tried = None

  def restart_with(self, settings: Settings, before: Settings) -> None:
    """Have the run go on with other settings, from a checkpoint that it saves now."""
    was, self._last_step = dict(before), dict(settings).get("num_steps", self._last_step)
    for name, now in settings:
      began, _ = self._settings.pop(name, (was[name], None))
      if now != began:
        self._settings[name] = (began, now)
    self.wants_checkpoint = self.wants_restart = True

  def _compare(self, step: int, state: TrainState) -> None:
    """Begin a comparison: the run's own next steps are its first arm."""
    proposal, self._proposal = self._proposal, None
    is_over = step >= self._terms.num_steps and not (proposal and proposal.at_once)
    if proposal is None or self._loop is None or self._probe is None:
      return
    if is_over or self.wants_restart or self._comparison is not None:
      return
    self._snapshots.reject()  # makes room for where the run is now
    held = self._probe.losses(self._scorer(self._program.rules(step))(state.model))
    self._teller.opened(step, proposal)
    self._comparison = Comparison(step, state, proposal, self._position(), held)

  def _end_comparison(self, step: int, state: TrainState) -> TrainState:
    """Make the other arms, and go on with the best."""
    comparison, self._comparison = self._comparison, None
    assert comparison is not None, "one is open"
    means = self._means(step, comparison)
    if means is None:
      self._give_up(step, comparison, "the model has other rules by now")
      return state
    ended = comparison.end(step, state, means)
    self._tried = None
    compared = Compared(comparison.proposal, ended.waiting, ended.scores, ended.made)
    self.made_again += ended.made
    self._clock.lap(max(ended.made, 1))  # or its time would count as slow training
    self._teller.comparison(step, comparison.first, compared)
    self.policy, judgement = decide(self._terms, self.policy, compared, step)
    check_agreement(self.policy, compared.waiting._asdict(), judgement)
    if not judgement.decisions:
      return ended.state
    self._snapshots.return_to(step if ended.origin is None else ended.origin)
    self._restored_step = self._changed_step = step
    if self._pending is not None:
      # They were of the arm that lost.
      self._pending = self._pending._replace(probe=None, logits=None, copies=None)
    if self._experts is not None:
      self._experts = OpenExperts(self._program.cfg, ended.state)
    for decision in judgement.decisions:
      self.decisions.append((step, decision))
      came_to = {}
      if decision.action.needs_saved:
        assert ended.origin is not None, "its arm began with an earlier state"
        lost = 0 if decision.action.replays else comparison.first - ended.origin
        cost = cost_of_lost_steps(self._program.cfg, lost, self._laps)
        came_to = {"to": ended.origin, "lost": cost}
      self._teller.decision(step, decision, came_to, applied=True)
      decision.action.tell(self, step, decision.reason)
    return ended.state

  def _means(self, step: int, comparison: Comparison) -> Means | None:
    """What the arms of a comparison are made with; None if the model has changed its rules."""
    ring, program, loop, probe = self._snapshots, self._program, self._loop, self._probe
    assert loop is not None and probe is not None, "or it would not have begun"
    rules, trains = program.rules(step), program.training_rules(step)
    same = lambda at: program.training_rules(at + 1) == trains and program.rules(at) == rules
    if not same(comparison.first):
      return None
    usable = lambda snapshot: snapshot if snapshot is not None and same(snapshot.step) else None
    good = usable(ring.back(0))

    def scoring(rules: Pass) -> dict[str, Any]:
      return {
        "held": lambda model: probe.losses(probe.score(program, model, rules)),
        "seen": lambda model, batch: probe_sums(Probe(batch).score(program, model, rules)),
      }

    means = Means(
      cfg=program.cfg,
      ahead=loop.ahead,
      **scoring(rules),
      catch_up=program.catch_up,
      good=good,
      first=usable(ring.first),
      unchanged=good is not None and self._changed_step <= good.step,
      exact=program.device.platform == "cpu" or program.cfg.precision.deterministic,
      margin=LEAST_MARGIN,
    )
    if not self._terms.eight_bits:
      return means
    return dataclasses.replace(means, wide=dataclasses.replace(
      means, **scoring(dataclasses.replace(rules, fp8=False))
    ))  # fmt: skip

  def earlier(self, back: int) -> tuple[int, TrainState] | None:
    """The newest good state but `back`, and the step that made it; else the last checkpoint's."""
    if (snapshot := self._snapshots.back(back)) is not None:
      return snapshot.step, snapshot.resume()
    restored = None if self._restore is None else self._restore()
    return None if restored is None else restored[:2]


def _request(asked: Action | hooks.Try) -> Request:
  if isinstance(asked, hooks.Try):
    return Request(asked.action, "comparison")
  return Request(asked)


def _looked(interval: Pending) -> dict[str, Any]:
  """Fields of a reading that are of the weights after an interval; waits for them."""
  metrics, logits = dict[str, float](), ()
  if interval.logits is not None:
    logits = tuple(np.asarray(interval.logits).tolist())
    if (largest := max(logits)) > -math.inf:
      metrics["orchestrator/attention_logit"] = largest
  if interval.copies is not None:
    metrics["orchestrator/odd_copies"] = float(np.count_nonzero(interval.copies))
  return {"looked": metrics, "logits": logits}


def _takes_up(judgement: Judgement, request: Request) -> bool:
  """Whether what a hook asked for is done or compared now, and need not wait any more."""
  if request.cause == "comparison":
    return judgement.proposal is not None and judgement.proposal.trigger == HOOK
  return any(decision.action is request.action for decision in judgement.decisions)
