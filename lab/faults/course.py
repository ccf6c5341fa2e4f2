"""One run of an arm under a scenario."""

import contextlib
import copy
import functools
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ats_jax.data.batch import POSITION, Batch
from ats_jax.metrics.spikes import spike_score
from ats_jax.model.param import params_of, trainable
from ats_jax.orchestrator.ports import NextUpdates
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.sharding.mesh import to_global
from ats_jax.step.state import StepMetrics, TrainState
from lab.faults.arms import How, find
from lab.faults.bench import Bench
from lab.faults.inject import Fault, Miscomputed
from lab.faults.keepers import Log, at_step, copied, keeper
from lab.faults.results import Record
from lab.faults.scenarios import SCENARIOS, Injection

SPIKY = ("train/loss", "train/grad_norm")  # whose spike scores are noted
Made = tuple[TrainState, StepMetrics]  # by an update
PREFIXES = (1, 2)  # checkpoints of a clean run from which others go on, `Bench.pause` steps apart
BEFORE = 20  # steps, at least, from there to the onset
# What the reflex of a step reports if it does nothing.
REFLEX = {"reflex/skipped": 0.0, "reflex/wrong": 0.0, "reflex/miscounted": 0.0,
          "reflex/grad_scale": 1.0, "reflex/rate_scale": 1.0}  # fmt: skip


class Loop:
  """The loop of a run, as far as a supervisor may ask for something (`orchestrator.ports.Loop`).

  `made` counts updates that were made for a supervisor's comparisons.
  """

  def __init__(self, bench: Bench, how: How, scenario: str, seed: int):
    self._bench, self._seed, self.scenario = bench, seed, SCENARIOS[scenario]
    self.program = bench.program(how, self.scenario.settings)
    other = functools.partial(bench.other_rows, seed)
    self.draw = self.scenario.draw(scenario, seed, bench.cfg.num_steps, bench.vocab_size, other)
    self.made, self.rate, self._next = 0, 1.0, 0
    self._old, self._params = None, list[Any]()

  def begin(self, state: TrainState, other: "Loop | None" = None) -> None:
    """Begin a run, or go on where that of a clean one of the same seed was."""
    if other is not None:
      self.made, self._next = other.made, other._next
    params: Any = trainable(state.model)
    self._params, self._old = params_of(params), copied(params)

  def injection(self, step: int) -> Injection:
    """What happens at a step (0-based)."""
    return self.scenario.inject(self.draw, step, self._bench.rows(self._seed, step))

  def update(self, step: int, state: TrainState, now: Injection) -> Made:
    """Make the update of a step; `state` is donated."""
    if step == self.draw.onset and self.scenario.computes is not None:
      self._old = copied(trainable(state.model))
    self._next = step + 1
    return self._step(step, now, to_global(now.rows, jax.sharding.get_mesh()), state)

  def _step(self, at: int, now: Injection, batch: Batch, state: TrainState) -> Made:
    computes = self.scenario.computes
    wrong = computes(self.draw, at, self._params) if computes is not None else None
    fault = Fault(*(np.float32(x) for x in (1.0, 1.0, now.schedule * self.rate)))
    rules = self.program.training_rules(1)  # of all updates: no layers skip tokens
    if wrong is None and self._bench.splits:
      return self.program.train_step(state, batch, rules, fault)
    wrong = (wrong or Miscomputed()).on_device()
    return self.program.train_step(state, batch, rules, fault, wrong, self._old)

  def position(self) -> dict[str, Any]:
    """The next step (0-based), as a checkpoint would keep the position in the data."""
    return {POSITION: {"row": self._next * self._bench.cfg.data.batch_size}}

  def ahead(self, saved: Mapping[str, Any] | None = None) -> NextUpdates:
    """The updates that come next, or again those that were made after the `saved` position.

    Rows go by the position in the data, rates by the state's count of steps, as in production; what
    is computed wrongly goes by the time at which it is computed.
    """
    size, end = self._bench.cfg.data.batch_size, self._bench.cfg.num_steps
    steps = range((saved or self.position())[POSITION]["row"] // size, end)
    return NextUpdates(self._again, functools.partial(self._batches, steps))

  def repeat(self, state: TrainState) -> Made:
    """Make the last update again; `state` is that before it, and is donated."""
    rows = self.injection(self._next - 1).rows
    return self._again(state, to_global(rows, jax.sharding.get_mesh()))

  def _again(self, state: TrainState, batch: Batch) -> Made:
    self.made += 1
    step = min(max(int(state.step), 0), self._bench.cfg.num_steps - 1)
    return self._step(self._next, self.injection(step), batch, state)

  @contextlib.contextmanager
  def _batches(self, steps: Iterable[int]) -> Iterator[Iterator[Batch]]:
    mesh = jax.sharding.get_mesh()
    yield (to_global(self.injection(step).rows, mesh) for step in steps)


class Checkpoint(NamedTuple):
  """Where a run, or another one like it, can go on."""

  state: Snapshot
  kept: Any  # what its keeper saved
  log: Log
  loop: Loop  # as it was there


class Course:
  """A run on its way, from step 0 or from a checkpoint of a clean run of the same seed."""

  def __init__(
    self, bench: Bench, arm: str, scenario: str, seed: int, begin: Checkpoint | None = None
  ):
    self._bench, self._arm = bench, find(arm)
    self.loop = Loop(bench, self._arm.how, scenario, seed)
    self.log, self.step = Log([], [], [], [], [], []), 0
    self.names, self.is_over = (), False
    self.keeper = keeper(self.log)
    if begin is None:
      self.state = copied(bench.first(self._arm.how, seed))
      self.loop.begin(self.state)
      self.checkpoint = self._checkpoint(None)
    else:
      self.log, self.step = begin.log.fork(), begin.state.step
      self.state, self.checkpoint = begin.state.resume(), begin
      self.loop.begin(self.state, begin.loop)
    self._watch()

  def _watch(self) -> None:
    """From the last checkpoint on."""
    bench, loop, domain = self._bench, self.loop, self.loop.scenario.domain
    look = lambda state: bench.look(loop.program, state, domain)
    # A schedule that is wrong is wrong for the host as well: nobody knows a right one.
    make = lambda: Supervisor(loop.program, bench.probe(domain), loop=loop, schedule=None)
    self.keeper.close()
    made = make if self._arm.supervised else None
    self.keeper = keeper(self.log, self._arm.guard, look, loop.repeat, made)
    self.keeper.start(self.step, self.state, self.checkpoint.kept)

  def _checkpoint(self, kept: Any) -> Checkpoint:
    state = Snapshot.take(self.step, self.state)
    return Checkpoint(state, kept, self.log.fork(), copy.copy(self.loop))

  def advance(self, end: int) -> None:
    """Train up to `end` steps, or until the run is over."""
    while self.step < end and not self.is_over:
      self._train()
      if self.step % self._bench.pause == 0 and not self.is_over:
        self.checkpoint = self._checkpoint(self.keeper.saved())

  def _train(self) -> None:
    now = self.loop.injection(self.step)
    if now.state is not None:
      self.state = now.state(self.state)
    self.keeper.before(self.state)
    self.loop.rate = self.keeper.rate
    state, metrics = self.loop.update(self.step, self.state, now)
    self.step, self.names = self.step + 1, metrics.names
    self.log.rows.append(metrics.values)
    try:
      self.state = self.keeper.after(self.step, state, metrics)
      if self.step % self._bench.pause == 0 or self.step == self._bench.cfg.num_steps:
        self.state = self.keeper.settle(self.step, self.state, metrics)
    except FloatingPointError:  # the supervisor gives up: what launched it starts it again, once
      self.log.stops.append(self.step)
      self.state = at_step(self.checkpoint.state.resume(), self.step)
      self.is_over = len(self.log.stops) > 1
      if not self.is_over:
        self._watch()


def shared(bench: Bench, scenario: str, seed: int) -> int:
  """Up to which of `PREFIXES` a run is the clean one; 0 = it is not."""
  kind = SCENARIOS[scenario]
  if kind.settings or kind.domain or kind.begins is not None:
    return 0
  onset = kind.draw(scenario, seed, bench.cfg.num_steps, 0, bench.other_rows).onset
  return max((n * bench.pause for n in PREFIXES if n * bench.pause + BEFORE <= onset), default=0)


def prefixes(bench: Bench, arm: str, seed: int) -> dict[int, Checkpoint]:
  """The beginning of a clean run of an arm, at each of `PREFIXES`."""
  course, found = Course(bench, arm, "clean", seed), {}
  for number in PREFIXES:
    course.advance(number * bench.pause)
    found[course.step] = course.checkpoint
  course.keeper.close()
  return found


def run(
  bench: Bench, arm: str, scenario: str, seed: int, begun: Mapping[int, Checkpoint] | None = None
) -> Record:
  """Train an arm once with something happening to it; `begun` are its `prefixes` of the seed.

  Returns a record without what `Bench.made_by` says; docs/lab/faults.md has the schema.
  """
  began = time.perf_counter()
  begin = (begun or {}).get(shared(bench, scenario, seed))
  course = Course(bench, arm, scenario, seed, begin)
  course.advance(bench.cfg.num_steps)
  course.keeper.close()
  loop, log, kind = course.loop, course.log, course.loop.scenario
  domains = ["main", *filter(None, [kind.domain])]
  scores = {name: bench.score(loop.program, course.state, name) for name in domains}
  columns = np.stack(jax.device_get(log.rows)).T
  metrics = dict(zip(course.names, columns, strict=True))
  acts = loop.program.cfg.orchestrator.mode == "act"
  reflex = {name: metrics[name] != usual for name, usual in REFLEX.items() if acts}
  left_out = reflex.get("reflex/skipped", np.zeros(len(log.rows), bool))
  left_out[: len(log.left_out)] |= np.array(log.left_out, bool)
  bits = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(trainable(course.state.model)))
  return {
    "arm": arm,
    "scenario": scenario,
    "class": kind.kind,
    "seed": seed,
    "onset": loop.draw.onset,
    "steps": bench.cfg.num_steps,
    "begun_at": begin.state.step if begin is not None else 0,
    "loss": scores["main"][0],
    "finite": all(finite for _, finite in scores.values()),
    "domains": {name: loss for name, (loss, _) in scores.items()},
    "spikes": {name: spike_score(metrics[name]) for name in SPIKY if name in metrics},
    "left_out": int(left_out.sum()),
    "rate_held": int(reflex.get("reflex/rate_scale", np.zeros(1)).sum()),
    "actions": log.actions,
    "looks": len(log.looks),
    "findings": [[step, reason] for step, reason in log.looks if reason],
    "causes": log.causes,
    "replayed": loop.made,
    "stops": log.stops,
    "fired": bool(left_out.any() or log.actions or log.stops or loop.made
                  or any(map(np.any, reflex.values()))),
    "weights": hashlib.sha256(bits).hexdigest()[:16],
    "secs": round(time.perf_counter() - began, 2),
  }  # fmt: skip
