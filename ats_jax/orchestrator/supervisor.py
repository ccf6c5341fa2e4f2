"""The host side: gathers what steps report, looks at it every interval, does what the policy says.

Nothing here waits for the device while it trains: a look at step t reads the interval before the
last, whose numbers have long arrived, and may start the probe that the next look reads. Only at a
checkpoint, where the loop waits anyway, is everything read.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

from absl import logging

from ats_jax.config.build import CHANGES
from ats_jax.data.batch import Batch
from ats_jax.metrics.clock import Totals
from ats_jax.metrics.watcher import Watcher
from ats_jax.metrics.writer import MetricWriter
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions.base import Settings, carry_out
from ats_jax.orchestrator.constants import SPAN_LOOKS
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.requests import Requests
from ats_jax.orchestrator.policy.state import Decision, PolicyState
from ats_jax.orchestrator.ports import Loop
from ats_jax.orchestrator.record.influence import cost_of_lost_steps
from ats_jax.orchestrator.record.ledger import check_agreement
from ats_jax.orchestrator.record.teller import Teller, Write
from ats_jax.orchestrator.signals.counts import Schedule
from ats_jax.orchestrator.signals.health import grown_logits, health_of, risen
from ats_jax.orchestrator.signals.probe import Probe
from ats_jax.orchestrator.signals.watch import Pending, Watch
from ats_jax.orchestrator.trials.arms import Proposal
from ats_jax.orchestrator.trials.compare import Comparison, Means
from ats_jax.orchestrator.trials.snapshots import (
  COPIES,
  COPIES_OF_COMPARISON,
  Snapshots,
  local_bytes,
)
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
WATCHED = "watched"  # how far tensors moved


class Supervisor(Watcher, MetricWriter):
  """Watches one run: it looks at the metrics of its steps, decides on actions and carries them out.

  It takes metrics as every writer does (`write_scalars`).

  Attributes:
    policy: the state of the policy, which each checkpoint keeps.
    decisions: the decisions of this process, each with the step at which it was taken.
    wants_checkpoint: whether an action needs a checkpoint now.
    wants_restart: whether the run is to be reopened from the checkpoint just saved, as an action
      changed its settings.
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
    self._program, self._cfg = program, program.cfg.orchestrator
    self._teller, self._restore, self._loop = Teller(ledger, write), restore, loop
    probed = None if probe is None else Probe(probe, domains)
    self._watch = Watch(program, probed, loop, totals, schedule)
    self._requests = Requests(program.cfg, self._teller)
    self._evaluated = list[float]()  # since the last look
    self._settings = dict[str, tuple[Any, Any]]()  # name -> first value, value now
    self._terms, self._last_step = Terms.of(program.cfg), program.cfg.num_steps
    self._pending: Pending | None = None
    self._proposal: Proposal | None = None  # of the last look
    self._comparison: Comparison | None = None
    self._restored_step = -1
    self._changed_step = self._looked_step = 0  # the last that was edited, and of the last look
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
      self._requests = Requests(self._program.cfg, self._teller, saved.get(WAITING, ()))
      self._evaluated = [*saved.get(EVALUATED, ())]
      self._settings = {name: (was, now) for name, (was, now) in saved.get(CHANGES, {}).items()}
    for hook in hooks.scheduled(step):
      self._requests.check(hook.wanted, step)
    if step:
      self._teller.write("resumed_from", step)
    has_room = self._snapshots.fits(state, COPIES_OF_COMPARISON)
    able = self.acts and has_room and self._loop is not None and self._watch.probe is not None
    self._begin_terms(step, compares=able)
    self._watch.start(step, state, (saved or {}).get(WATCHED))
    if not self.acts:
      return
    self._snapshots.start(step, state, {**(saved or {}), **self._remembered()})
    self._snapshots.keeps_first = step == 0
    gb = COPIES * local_bytes(state) / 2**30
    where = f"snapshots in host memory, {gb:.3g} GB" if self._snapshots.good else (
      f"the last checkpoint, compares nothing: snapshots would take {gb:.3g} GB of host memory, "
      f"and orchestrator.snapshot_gb={self._cfg.snapshot_gb:g}"
    )  # fmt: skip
    logging.info("orchestrator: rolls back to %s", where)
    if self._snapshots.good and not has_room:
      logging.info("orchestrator: compares nothing, which takes five snapshots' memory")
    elif able and not self._terms.may_compare(self.policy):
      logging.info(
        "orchestrator: compares nothing: an arm makes %d updates, and "
        "orchestrator.compare_share=%g leaves %d", SPAN_LOOKS * self._cfg.check_interval,
        self._cfg.compare_share, self._terms.left(self.policy),
      )  # fmt: skip

  def _begin_terms(self, step: int, *, compares: bool) -> None:
    """Note the terms by which is decided from here on."""
    eight_bits = self._program.cfg.precision.fp8 and self._program.fp8
    self._terms = self._terms._replace(compares=compares, eight_bits=eight_bits)
    facts = {name: x for name, x in self._terms._asdict().items() if name != "cfg"}
    self._teller.write(
      "start", step, settings=dataclasses.asdict(self._cfg), **facts,
      accum_steps=self._program.cfg.step.accum_steps,
    )  # fmt: skip

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """Score the probe with `program` from update `step` on; compiles the scoring.

    Call it whenever the train step is compiled: when 8 bits are switched off, and as `mod.capacity`
    falls. Losses under other rules are not compared, see `decide`. Of `state` only shapes matter.
    """
    self._program = program
    if self._terms.eight_bits and not program.fp8:
      self._begin_terms(step - 1, compares=self._terms.compares)
    self._watch.follow(program, step, state)

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Take in the results of update `step`; returns the state to go on with, in place of `state`.

    Raises:
      FloatingPointError: if the policy gives the run up.
    """
    self.write_scalars(step, metrics)
    if step % self._cfg.check_interval:
      return state
    if self._pending is not None:
      state = self._look(step, state, self._pending)
    self._pending = self._watch.gather(step, state, scores=step > self.policy.acted_step)
    span = SPAN_LOOKS * self._cfg.check_interval
    if self._comparison is not None and step >= self._comparison.first + span:
      state = self._end_comparison(step, state)
    elif self._proposal is not None:
      self._compare(step, state)
    if self.acts and step > self.policy.acted_step and self._comparison is None:
      self._snapshots.offer(step, state, self._remembered())
    return state

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Look at all steps so far, waiting for their numbers: a checkpoint must be sound.

    Raises:
      FloatingPointError: if weights are not finite and nothing mends them.
    """
    pending, self._pending = self._pending, None
    if pending is not None and self._watch.has_steps:
      state, pending = self._look(step, state, pending, pause=True), None
    if (last := self._watch.settle(pending, step, state)) is not None:
      state = self._look(step, state, last, pause=True)
    if self._restored_step != step:  # else `metrics` are of the state that was replaced
      check_finite(step, metrics)
    if self._comparison is not None and step == self._terms.num_steps:
      state = self._end_comparison(step, state)
    if step >= self._last_step:
      self._requests.end(step)
    return state

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any] | StepMetrics) -> None:
    """Take in metrics of an evaluation, or of an update, which may not be computed yet."""
    if isinstance(scalars, StepMetrics):
      self._watch.take(scalars)
      if self._comparison is not None:
        self._comparison.metrics.append(scalars)
    elif "eval/loss" in scalars:  # of the validation split; the next look sees it
      self._evaluated.append(float(scalars["eval/loss"]))

  def saved(self) -> dict[str, Any]:
    """What to keep with a checkpoint, right after `settle`; JSON values."""
    self.wants_checkpoint = False
    self.flush()
    return self._memory()

  def _memory(self) -> dict[str, Any]:
    return {
      SAVED: self.policy.to_json(),
      WAITING: self._requests.to_json(),
      EVALUATED: [*self._evaluated],
      WATCHED: self._watch.remembered(),
      CHANGES: self._settings,
    }

  def _remembered(self) -> dict[str, Any]:
    """What a checkpoint would hold beside the state."""
    position = {} if self._loop is None else self._loop.position()
    return {**position, **self._memory()}

  @override
  def flush(self) -> None:
    """Make the ledger durable."""
    self._teller.flush()

  @override
  def close(self) -> None:
    """Make the ledger durable."""
    self._teller.close()

  def _look(
    self, step: int, state: TrainState, pending: Pending, *, pause: bool = False
  ) -> TrainState:
    """Conclude from an interval, act, and record both."""
    reading, steps = self._watch.read(pending)
    request = None
    if not self.wants_restart:
      request = self._requests.ready(self._terms, self.policy, state, step, pause=pause)
    seen, self._evaluated = Interval(reading, request, tuple(self._evaluated)), []
    self.policy, judgement = decide(self._terms, self.policy, seen, step)
    check_agreement(self.policy, reading._asdict(), judgement, self._requests.to_json())
    since, usual = self.policy.logits
    further = (
      *risen(judgement.above), *grown_logits(reading.logits, usual, since),
      *self._watch.causes(judgement.rises, pending.read, steps),
    )  # fmt: skip
    health = health_of(reading.means, reading.nonfinite, judgement.finding, further)
    self._teller.look(step, seen, judgement, health, pending.host)
    batch_size = self._program.cfg.data.batch_size
    self._teller.steps(step, steps, pending.read, batch_size)
    if not judgement.stale and not judgement.good:
      self._snapshots.reject()
    elif not judgement.stale and (reading.held or self._watch.probe is None):
      self._snapshots.confirm(reading.first)  # not by the training loss alone
    for decision in judgement.decisions:
      self.decisions.append((step, decision))
      state = self._carry_out(step, state, decision)
    self._proposal = judgement.proposal or self._proposal  # a pause may look twice
    if request is not None:
      busy = self._comparison is not None or self._proposal is not None
      self._requests.answer(request, judgement, step, busy=busy)
    if self._proposal is not None and self._proposal.at_once:
      self._compare(step, state)
      state = self._end_comparison(step, state)
    self._snapshots.keeps_first &= self.policy.start is not None or self._proposal is not None
    self._teller.metrics(step, reading, self.policy, health)
    if judgement.asks is not None and not self._requests.waiting and step < self._terms.num_steps:
      self._requests.queue(judgement.asks, step)
    since, self._looked_step = self._looked_step, step
    for asked in hooks.call(hooks.Look(step, since, reading, health, judgement)):
      self._requests.add(asked, step)
    return state

  def _carry_out(self, step: int, state: TrainState, decision: Decision) -> TrainState:
    action, saved, came_to = decision.action, None, {}
    if self.acts:
      saved, came_to = action.find(self, step, state)
    if saved is not None:
      saved = self._program.catch_up(saved, came_to["to"])
      lost = step - came_to["to"]
      came_to["lost"] = cost_of_lost_steps(self._program.cfg, lost, self._watch.laps)
    applied = self.acts and not (action.needs_saved and saved is None)
    self._teller.decision(step, decision, came_to, applied=applied)
    if not applied:
      return state
    action.check(self._program.cfg)
    action.tell(self, step, decision.reason)
    weighs = action.at_pause and self._watch.probe is not None
    before = self._held(step, state) if weighs else {}
    changed = carry_out(action, state, self._program.cfg, saved)
    if weighs:
      self._teller.weighed(step, action, before[""], self._held(step, changed)[""])
    self._changed_step = step
    if self._comparison is not None:
      self._give_up(step, self._comparison, f"{action} comes before it")
    if saved is not None:
      self._restored_step = step
    if action.edits:
      self._watch.edited(changed)
    return changed

  def _held(self, step: int, state: TrainState) -> dict[str, float]:
    """Losses of the probe, by domain."""
    held, _ = self._watch.scoring(self._program.rules(step))
    return held(state.model)

  def _give_up(self, step: int, comparison: Comparison, reason: str) -> None:
    """Drop a comparison under way."""
    self._teller.given_up(step, comparison.first, reason)
    self._comparison = self._requests.tried = None

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
    assert proposal is not None, "something is to be compared"
    is_over = step >= self._terms.num_steps and not proposal.at_once
    if is_over or self.wants_restart or self._comparison is not None:
      return
    self._snapshots.reject()  # makes room for where the run is now
    held = self._held(step, state)
    self._teller.opened(step, proposal)
    self._comparison = Comparison(step, state, proposal, self._remembered(), held)

  def _end_comparison(self, step: int, state: TrainState) -> TrainState:
    """Make the other arms, and go on with the best."""
    comparison, self._comparison = self._comparison, None
    if comparison is None:
      return state
    assert self._loop is not None, "or nothing is compared"
    means = Means.of(
      self._watch, self._loop, self._snapshots, comparison.first, step, self._changed_step
    )
    if means is None:
      self._give_up(step, comparison, "the model has other rules by now")
      return state
    ended = comparison.end(step, state, means, self._terms.left(self.policy))
    self._requests.tried = None
    compared = ended.compared
    self._watch.pass_over(compared.made)
    self._teller.comparison(step, comparison.first, compared, ended.losses)
    self.policy, judgement = decide(self._terms, self.policy, compared, step)
    check_agreement(self.policy, compared.waiting._asdict(), judgement)
    if not judgement.decisions:
      return ended.state
    self._snapshots.return_to(step if ended.origin is None else ended.origin)
    self._restored_step = self._changed_step = step
    if self._pending is not None:  # it is of the arm that lost
      self._pending = self._pending.of_another_path()
    self._watch.edited(ended.state)
    for decision in judgement.decisions:
      self.decisions.append((step, decision))
      came_to = {}
      if decision.action.needs_saved:
        assert ended.origin is not None, "its arm began with an earlier state"
        lost = 0 if decision.action.replays else comparison.first - ended.origin
        cost = cost_of_lost_steps(self._program.cfg, lost, self._watch.laps)
        came_to = {"to": ended.origin, "lost": cost}
      self._teller.decision(step, decision, came_to, applied=True)
      decision.action.tell(self, step, decision.reason)
    return ended.state

  def earlier(self, back: int) -> tuple[int, TrainState] | None:
    """The newest good state but `back`, and the step that made it; else the last checkpoint's."""
    if (snapshot := self._snapshots.back(back)) is not None:
      return snapshot.step, snapshot.resume()
    restored = None if self._restore is None else self._restore()
    return None if restored is None else restored[:2]
