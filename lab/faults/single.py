"""One run of an arm under a scenario."""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.checkpoint.layout import named_arrays
from ats_jax.config.schema import Config
from ats_jax.data.batch import POSITION, Batch
from ats_jax.model.layout import stacks
from ats_jax.model.param import trainable
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import Rollback, SetLearningRateScale
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.signals.interval import SCALES
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.paired import NextUpdates, Update
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.sharding.mesh import to_global
from ats_jax.step.state import StepMetrics, TrainState
from lab.faults.arms import Arm
from lab.faults.audit import KNOWN
from lab.faults.bench import Bench
from lab.faults.inject import Fault
from lab.faults.results import Record
from lab.faults.scenarios import Injection
from lab.faults.watchers import RULE_METRICS, Unguarded

BALANCED = 1.0  # of the largest load over the mean, less 1: below, experts are balanced
WINDOW = 10  # steps over which loads are averaged
MENDED = ("reflex/wrong", "reflex/miscounted")  # numbers of the state that were put right
SAID = 20  # sentences that a record keeps


class Loop:
  """The loop of a run, as far as a supervisor may ask for something.

  Attributes:
    made: updates that were made for it, again or ahead: each costs the run one of its own.
  """

  def __init__(self, bench: Bench, arm: Arm, scenario: str, seed: int):
    """Let chance decide what is going to happen."""
    self._bench, self._arm, self._seed = bench, arm, seed
    self.kind, self.made = KNOWN[scenario], 0
    other = functools.partial(bench.other_rows, seed)
    self.draw = self.kind.draw(scenario, seed, bench.cfg.num_steps, bench.vocab_size, other)
    self.memory, self._next, self._last = arm.memory, 0, None
    self._trained: list[int] = []

  def injection(self, step: int) -> Injection:
    """What happens at a step (0-based)."""
    return self.kind.inject(self.draw, step, self._bench.rows(self._seed, step))

  def update(self, step: int, state: TrainState, now: Injection) -> tuple[TrainState, StepMetrics]:
    """Make the update of a step; `state` is donated."""
    fault, batch = _fault(now), to_global(now.rows, jax.sharding.get_mesh())
    self._last, self._next = (self.memory, batch, fault), step + 1
    self._trained.append(step)
    state, self.memory, metrics = self._arm.step(state, self.memory, batch, fault)
    return state, metrics

  def position(self) -> dict[str, Any]:
    """The next step (0-based), as a checkpoint would keep the position in the data."""
    return {POSITION: {"row": self._next * self._bench.cfg.data.batch_size}}

  def again(self) -> Update:
    """What makes the last update once more."""
    assert self._last is not None, "no update was made"
    memory, batch, fault = self._last
    return functools.partial(self._more, memory, batch, fault)

  def ahead(self, saved: Mapping[str, Any] | None = None) -> NextUpdates:
    """The updates that come next, with all that is going to happen to their rows and rates.

    Rows go by the position in the data, rates by the state's count of steps, as in production.

    Args:
      saved: what `position` gave: the updates that were made after it, again. None = now.
    """
    if saved is None:
      return NextUpdates(self._step_ahead, functools.partial(self._batches, self._left()))
    first = saved[POSITION]["row"] // self._bench.cfg.data.batch_size
    steps = [step for step in self._trained if step >= first]
    numbers = iter(steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
      # Over steps that were paid for others, whose batches are gone.
      return self._step_ahead(_at_step(state, next(numbers)), batch)

    return NextUpdates(train_step, functools.partial(self._batches, steps))

  def _left(self) -> range:
    return range(self._next, self._bench.cfg.num_steps)

  def _step_ahead(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    step = min(max(int(state.step), 0), self._bench.cfg.num_steps - 1)
    return self._more(self.memory, batch, _fault(self.injection(step)), state)

  @contextlib.contextmanager
  def _batches(self, steps: Iterable[int]) -> Iterator[Iterator[Batch]]:
    mesh = jax.sharding.get_mesh()
    yield (to_global(self.injection(step).rows, mesh) for step in steps)

  def _more(
    self, memory: Any, batch: Batch, fault: Fault, state: TrainState
  ) -> tuple[TrainState, StepMetrics]:
    self.made += 1
    state, _, metrics = self._arm.step(state, memory, batch, fault)
    return state, metrics


def _at_step(state: TrainState, step: int) -> TrainState:
  return dataclasses.replace(state, step=jnp.full_like(state.step, step))


def _fault(now: Injection) -> Fault:
  return Fault(*(jnp.float32(x) for x in (now.gradient, now.rate, now.schedule)))


class _Watch:
  """Who watches a run, and the checkpoint that it goes on from after a stop.

  Attributes:
    stops: steps after which it stopped.
    replaced: supervisors of before.
  """

  def __init__(self, bench: Bench, arm: Arm, loop: Loop, state: TrainState):
    self._bench, self._arm, self._loop = bench, arm, loop
    self.stops = list[int]()
    self.all: list[Supervisor | NoSupervisor] = []
    self._begin(0, state, {})
    self._checkpoint = Snapshot.take(0, state) if bench.restarts else None
    self._saved: dict[str, Any] = {}

  @property
  def now(self) -> Supervisor | NoSupervisor:
    """The one of this stretch."""
    return self.all[-1]

  def _begin(self, step: int, state: TrainState, saved: dict[str, Any]) -> None:
    supervisor = self._arm.supervise(self._bench.probe, self._loop)
    if self._bench.restarts and type(supervisor) is NoSupervisor:
      supervisor = Unguarded()
    supervisor.start(step, state, saved)
    self.all.append(supervisor)

  def save(self, step: int, state: TrainState) -> None:
    """A checkpoint, right after `settle`."""
    if self._bench.restarts:
      self._checkpoint, self._saved = Snapshot.take(step, state), dict(self.now.saved())

  def restart(self, step: int, state: TrainState) -> tuple[TrainState, bool]:
    """After an error: the state to go on from, and whether the run goes on at all."""
    self.stops.append(step)
    if self._checkpoint is None:
      return state, False
    old = self._checkpoint.resume()
    state = _at_step(old, step)  # batches are gone
    if len(self.stops) > 1 or step >= self._bench.cfg.num_steps:
      return state, False
    self._begin(step, state, self._saved)
    return state, True


def run(bench: Bench, arm: Arm, scenario: str, seed: int, state: TrainState) -> Record:
  """Train `arm` once with something happening to it.

  Args:
    bench: see there.
    arm: see there.
    scenario: name in `KNOWN`.
    seed: decides data, initial weights and all that chance decides.
    state: the state of step 0 for this seed; donated.

  Returns:
    What the table is made of; see docs/lab/faults.md.
  """
  began, num_steps = time.perf_counter(), bench.cfg.num_steps
  loop = Loop(bench, arm, scenario, seed)
  kind, draw = loop.kind, loop.draw
  watch, looks = _Watch(bench, arm, loop, state), list[hooks.Look]()
  rows, tokens, hit = list[StepMetrics](), [], list[str]()
  charged, jumps = 0, list[float]()
  hook = hooks.register(looks.append)
  try:
    for step in range(num_steps):
      if charged < loop.made:  # a step that was made twice counts twice
        state, charged = dataclasses.replace(state, step=state.step + 1), charged + 1
        continue
      now = loop.injection(step)
      if arm.knows and not kind.is_control:
        clean = bench.rows(seed, step)
        same = all(np.array_equal(now.rows[name], rows) for name, rows in clean.items())
        if not same or now.gradient != 1.0:  # that batch, or its gradient, is lost
          state = dataclasses.replace(state, step=state.step + 1)
          continue
        now = Injection(clean)
      if now.state is not None:
        before, state = state, now.state(state)
        hit += changed(bench.cfg, before, state)
      tokens.append(_tokens(now, kind.domain))
      state, metrics = loop.update(step, state, now)
      rows.append(metrics)
      try:
        state = watch.now.after(step + 1, state, metrics)
        if bench.pauses(step + 1):
          before, done = bench.look(arm, state), len(watch.now.decisions)
          state = watch.now.settle(step + 1, state, metrics)
          new = [decision.action for _, decision in watch.now.decisions[done:]]
          if new and all(action.at_pause for action in new):
            jumps.append(bench.look(arm, state) - before)
          watch.save(step + 1, state)
      except FloatingPointError:  # the supervisor gives up, or the weights are not finite
        state, goes_on = watch.restart(step + 1, state)
        if not goes_on:
          break
  finally:
    hooks.unregister(hook)
  loss, finite = bench.score(arm, state)
  names = ["main", *filter(None, [kind.domain])]
  columns = np.stack(jax.device_get([row.values for row in rows])).T
  reported = dict(zip(rows[0].names, columns, strict=True))
  return {
    "arm": arm.name,
    "scenario": scenario,
    "seed": seed,
    "onset": draw.onset,
    "severity": draw.severity,
    "loss": loss,
    "finite": finite,
    "domains": {name: bench.score(arm, state, name)[0] for name in names},
    "tokens": _left_out(reported, np.array(tokens), names),
    "steps": num_steps,
    "updates": _updates(state),
    "weights": _digest(state),
    "hit": hit,
    **_reactions(reported, draw.onset),
    **(_balance(reported, draw.onset) | {"jumps": jumps} if bench.cfg.moe.num_experts else {}),
    **_looks(looks),
    **_decisions(watch.all),
    "replayed": loop.made,
    "stops": watch.stops,
    "stopped": bool(watch.stops) and watch.stops[-1] < num_steps,
    "secs": round(time.perf_counter() - began, 2),
  }


def changed(cfg: Config, before: TrainState, after: TrainState) -> list[str]:
  """Names of the arrays that differ, layer by layer, as checkpoints call them."""
  of = lambda state: dataclasses.replace(state, key=jax.random.key_data(state.key))
  old, new = (named_arrays(of(state), stacks=stacks(cfg)) for state in (before, after))
  array = lambda part: np.asarray(part.leaf if part.layer is None else part.leaf[part.layer])
  return [name for name in old if array(old[name]).tobytes() != array(new[name]).tobytes()]


def _tokens(now: Injection, domain: str) -> tuple[int, int]:
  """Tokens with loss of a batch: of the run's own text, and of the minority's."""
  counts = now.rows["loss_mask"].sum(axis=(0, 2))
  if not domain:
    return int(counts.sum()), 0
  assert now.minority is not None
  return int(counts[~now.minority].sum()), int(counts[now.minority].sum())


def _left_out(
  metrics: dict[str, np.ndarray], tokens: np.ndarray, names: list[str]
) -> dict[str, list[int]]:
  """Of each domain: tokens of batches with finite loss and gradient, and those left out of them."""
  finite = np.isfinite(metrics["train/loss"]) & np.isfinite(metrics["train/grad_norm"])
  out = finite & _skipped(metrics)
  return {
    name: [int(tokens[finite, i].sum()), int(tokens[out, i].sum())] for i, name in enumerate(names)
  }


def _skipped(metrics: dict[str, np.ndarray]) -> np.ndarray:
  """Steps whose update was not made, by the arm's own decision."""
  found = [metrics[name] > 0 for name in ("rule/skipped", "reflex/skipped") if name in metrics]
  return np.any(found, axis=0) if found else np.zeros(len(metrics["train/loss"]), bool)


def _updates(state: TrainState) -> int | None:
  """Updates that are in the weights, as Adam counts them."""
  found = jax.tree_util.tree_leaves_with_path(state.opt_state)
  counts = [int(x) for path, x in found if jax.tree_util.keystr(path).endswith(".steps")]
  return counts[0] if counts else None


def _digest(state: TrainState) -> str:
  """Names the weights bit for bit."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(trainable(state.model)):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()[:16]


def _reactions(metrics: dict[str, np.ndarray], onset: int) -> Record:
  """Whether and when the arm did something; empty for arms that do not say."""
  if set(RULE_METRICS) <= metrics.keys():
    scales = ("rule/rate",)
  elif "reflex/skipped" in metrics:
    scales = SCALES
  else:
    return {}
  skipped = _skipped(metrics)
  mended = [metrics[name] != 0.0 for name in MENDED if name in metrics]
  acted = np.any([skipped, *mended, *(metrics[name] != 1.0 for name in scales)], axis=0)
  after = np.flatnonzero(acted[onset:])
  return {
    "delay": int(after[0]) if after.size else None,
    "acted": int(acted.sum()),
    "acted_early": int(acted[:onset].sum()),
    "skipped": int(skipped.sum()),
    "skipped_early": int(skipped[:onset].sum()),
  }


def _balance(metrics: dict[str, np.ndarray], onset: int) -> Record:
  """How experts were loaded.

  Returns:
    worst violation at the onset; steps from there until it is below `BALANCED`, averaged over a
    window, None if it never is; least load, over the mean, at the end.
  """
  violation = metrics["moe/max_violation"][onset:]
  smooth = np.convolve(violation, np.ones(WINDOW) / WINDOW, "valid")
  below = np.flatnonzero(smooth < BALANCED)
  return {
    "violation": float(violation[0]),
    "balanced": int(below[0]) + WINDOW if below.size else None,
    "min_load": float(np.mean(metrics["moe/min_load"][-WINDOW:])),
  }


def _looks(looks: list[hooks.Look]) -> Record:
  """What was concluded and said at the looks of supervisors."""
  findings = [(look.reading.step, found) for look in looks if (found := look.judgement.finding)]
  said = [found.reason for _, found in findings]
  said += [decision.reason for look in looks for decision in look.judgement.decisions]
  said += [cause for look in looks for cause in look.health.causes]
  return {
    "looks": len(looks),
    "looks_acted": sum(bool(look.judgement.decisions) for look in looks),
    "findings": [[step, found.cause, found.confidence] for step, found in findings],
    "verdicts": [look.judgement.outcome[:2] for look in looks if look.judgement.outcome],
    "said": list(dict.fromkeys(said))[:SAID],
  }


def _decisions(supervisors: list[Supervisor | NoSupervisor]) -> Record:
  """What supervisors did; nothing if there is none."""
  taken = [pair for supervisor in supervisors for pair in supervisor.decisions]
  is_cut = lambda a: isinstance(a, SetLearningRateScale) and a.scale < a.before
  on_purpose = [d.action for _, d in taken if d.cause != "harm"]
  return {
    "decisions": [[step, d.id, d.cause, d.confidence, d.action.to_json()] for step, d in taken],
    "rollbacks": sum(isinstance(action, Rollback) for action in on_purpose),
    "cuts": sum(map(is_cut, on_purpose)),
    "undone": sum(d.cause == "harm" for _, d in taken),
  }
