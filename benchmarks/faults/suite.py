"""One run of an arm under a scenario, and all runs of a suite."""

import dataclasses
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.data.dataset import Dataset
from ats_jax.data.splits import open_datasets, open_split
from ats_jax.model.decoder import Decoder
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import Rollback, SetLearningRateScale
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.supervisor import NoSupervisor, Supervisor
from ats_jax.orchestrator.trials.paired import Ahead, Update
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.metrics import REFLEX_METRICS, StepMetrics
from ats_jax.step.state import TrainState, init_state
from benchmarks.faults.arms import ARMS, RULE_METRICS, Arm, build_arm
from benchmarks.faults.inject import Fault
from benchmarks.faults.results import Record, Results
from benchmarks.faults.scenarios import SCENARIOS, Injection, Rows

PROTOCOL = 1  # raise it when a scenario, an arm or the scoring changes
SCORED_ROWS, PROBE_ROWS = 1024, 64  # of the validation split
TUNING_SEEDS, HELD_OUT_SEEDS = range(10), range(100, 110)
BALANCED = 1.0  # of the largest load over the mean, less 1: below, experts are balanced
WINDOW = 10  # steps over which loads are averaged

# A byte-level model that trains in seconds on one core.
SETTINGS = {
  "num_steps": 400,
  "model.num_layers": 2,
  "model.d_model": 48,
  "model.num_heads": 4,
  "model.num_kv_heads": 4,
  "model.d_ff": 128,
  "data.tokenizer": "bytes",
  "data.seq_len": 32,
  "data.batch_size": 16,
  "optimizer.learning_rate": 4e-3,
  "optimizer.warmup_steps": 50,
  "optimizer.schedule": "wsd",
  "optimizer.decay_fraction": 0.3,
  "optimizer.final_lr_fraction": 0.05,
  "orchestrator.check_interval": 10,
  "orchestrator.snapshot_interval": 10,
  "orchestrator.probe_share": 1.0,  # its steps are some hundred tokens: read at each look
  "precision.compute_dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Suite:
  """What is run.

  Attributes:
    arms: names in `ARMS` or `OTHER_ARMS`.
    scenarios: names in `SCENARIOS`.
    seeds: of the runs.
    settings: what differs from `SETTINGS`.
    pause_every: steps between two pauses, as training makes them before a checkpoint; 0 = only at
      the end.
  """

  arms: tuple[str, ...]
  scenarios: tuple[str, ...]
  seeds: tuple[int, ...]
  settings: tuple[tuple[str, int | float | str], ...] = ()
  pause_every: int = 0


def family(*names: str) -> tuple[str, ...]:
  """The scenarios of these families."""
  return tuple(name for name, kind in SCENARIOS.items() if kind.family in names)


DENSE = family("F1", "F2", "F3", "F4", "F5", "F6", "F7", "N1")
# Eight experts, of which a token uses two.
EXPERTS = (
  ("num_steps", 500),
  ("moe.num_experts", 8),
  ("moe.d_ff", 64),
  ("moe.router_bias", True),
  ("moe.spare_experts", 1),
  ("orchestrator.check_interval", 5),
)
# 26 million parameters, for a GPU.
LARGE = (
  ("num_steps", 600),
  ("model.num_layers", 8),
  ("model.d_model", 512),
  ("model.num_heads", 8),
  ("model.num_kv_heads", 8),
  ("model.d_ff", 1408),
  ("data.seq_len", 256),
  ("data.batch_size", 32),
  ("optimizer.learning_rate", 1e-3),
  ("optimizer.warmup_steps", 60),
  ("precision.compute_dtype", "bfloat16"),
)
SMOKE_FAULTS = ("rate_burst", "noise_burst", "nan_gradient", "nan_weight", "repeats")
SMOKE_CONTROLS = ("clean", "domain_switch")
SUITES = {
  "smoke": Suite(("clip", "ours"), (*SMOKE_FAULTS, *SMOKE_CONTROLS), (0,), (("num_steps", 200),)),
  "tune": Suite(tuple(ARMS), DENSE, tuple(TUNING_SEEDS)),
  "full": Suite(tuple(ARMS), DENSE, tuple(HELD_OUT_SEEDS)),
  "large": Suite(
    ("none", "clip", "zclip", "skip_step", "ours"),
    ("rate_burst", "shuffled_targets", "scaled_matrix", "clean"),
    tuple(HELD_OUT_SEEDS)[:2],
    LARGE,
  ),
  "experts": Suite(
    ("unbalanced", "switch", "clip", "ours"),
    (*family("F8", "F9"), "clean"),
    tuple(HELD_OUT_SEEDS)[:5],
    EXPERTS,
    pause_every=50,
  ),
  "plateau": Suite(
    ("none", "clip", "ours+rate"),
    ("low_rate", "clean"),
    tuple(range(100, 120)),
    (("num_steps", 600),),
  ),
}


class Bench:
  """Data and scoring that all arms share. Make it and use it under a mesh of one device.

  Attributes:
    cfg: resolved; arms change some of it.
    vocab_size: of the tokenizer.
    probe: held-out rows that supervisors look at; others than those that are scored.
    protocol: names what decides the figures, but for the code of the arms.
  """

  def __init__(self, suite: Suite):
    config = base_config()
    config.update_from_flattened_dict(SETTINGS | dict(suite.settings))
    cfg = from_config_dict(config)
    self._train, valid = open_datasets(cfg.data, 0)
    self._foreign = open_split(cfg.data, 0, _foreign_text(), self._train.tokenizer)
    self.cfg = resolve(cfg, self._train.tokenizer.vocab_size)
    self.vocab_size = self._train.tokenizer.vocab_size
    held_out = lambda *numbers: to_global(valid.rows(np.arange(*numbers)), jax.sharding.get_mesh())
    self._scored = held_out(SCORED_ROWS)
    self.probe = held_out(SCORED_ROWS, SCORED_ROWS + PROBE_ROWS)
    self._pause_every = suite.pause_every
    c = self.cfg
    parts = [PROTOCOL, self._train.fingerprint, self._foreign.fingerprint,
             c.num_steps, c.model, c.data, c.optimizer, c.precision]  # fmt: skip
    parts += [c.moe, suite.pause_every] if c.moe.num_experts else []
    self.protocol = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

  def rows(self, seed: int, step: int) -> Rows:
    """The batch of a step (0-based); each seed reads rows of its own."""
    return _rows(self._train, self.cfg, seed, step)

  def foreign_rows(self, seed: int, step: int) -> Rows:
    """The same of another kind of text: English prose."""
    return _rows(self._foreign, self.cfg, seed, step)

  def pauses(self, step: int) -> bool:
    """Whether the loop waits after `step` updates."""
    return step == self.cfg.num_steps or (self._pause_every > 0 and step % self._pause_every == 0)

  def look(self, arm: Arm, state: TrainState) -> float:
    """Loss of the trained weights on the probe batch, nats."""
    return probe_loss(self._sums(arm, state.model, self.probe))

  def score(self, arm: Arm, state: TrainState) -> tuple[float, bool]:
    """Validation loss in nats, at most ln V; and whether it was finite."""
    total, _, tokens = self._sums(arm, state.weights, self._scored).tolist()
    loss, worst = total / tokens, math.log(self.vocab_size)
    return (min(loss, worst), True) if math.isfinite(loss) else (worst, False)

  def _sums(self, arm: Arm, model: Decoder, rows: Batch) -> np.ndarray:
    return np.asarray(arm.program.eval_step(model, rows, arm.program.rules(self.cfg.num_steps)))


def _foreign_text() -> str:
  """The documentation that `help()` shows: prose, where the training text is code."""
  import pydoc_data.topics

  return str(pydoc_data.topics.__file__)


def _rows(dataset: Dataset, cfg: Config, seed: int, step: int) -> Rows:
  size = cfg.data.batch_size
  first = (seed * cfg.num_steps + step) * size
  return dataset.global_rows(np.arange(first, first + size)[None])


class _Lent:
  """What the loop lends to a supervisor that tries nothing ahead."""

  last: Update

  def position(self) -> dict[str, Any]:
    return {}

  def again(self) -> Update:
    return self.last

  def ahead(self) -> Ahead:
    raise AssertionError("no suite has orchestrator.branch_steps")


def run(bench: Bench, arm: Arm, scenario: str, seed: int, state: TrainState) -> Record:
  """Train `arm` once with something happening to it.

  Args:
    bench: see there.
    arm: see there.
    scenario: name in `SCENARIOS`.
    seed: decides data, initial weights and all that chance decides.
    state: the state of step 0 for this seed; donated.

  Returns:
    What the table is made of; see docs/faults.md.
  """
  began, mesh, num_steps = time.perf_counter(), jax.sharding.get_mesh(), bench.cfg.num_steps
  kind = SCENARIOS[scenario]
  foreign = functools.partial(bench.foreign_rows, seed)
  draw = kind.draw(scenario, seed, num_steps, bench.vocab_size, foreign)
  memory, rows, stopped = arm.memory, [], False
  lent = _Lent()
  supervisor, looks = arm.supervise(bench.probe, lent), list[hooks.Look]()
  charged, jumps = 0, list[float]()
  supervisor.start(0, state)
  hook = hooks.register(looks.append)
  try:
    for step in range(num_steps):
      if charged < supervisor.replayed:  # a step that was made twice counts twice
        state, charged = dataclasses.replace(state, step=state.step + 1), charged + 1
        continue
      clean = bench.rows(seed, step)
      now = kind.inject(draw, step, clean)
      if arm.knows and not kind.is_control:
        if now.rows is not clean or now.gradient != 1.0:  # that batch, or its gradient, is lost
          state = dataclasses.replace(state, step=state.step + 1)
          continue
        now = Injection(clean)
      if now.state is not None:
        state = now.state(state)
      fault = Fault(jnp.float32(now.gradient), jnp.float32(now.rate))
      batch = to_global(now.rows, mesh)
      lent.last = functools.partial(_again, arm, memory, batch, fault)
      state, memory, metrics = arm.step(state, memory, batch, fault)
      rows.append(metrics.values)
      state = supervisor.after(step + 1, state, metrics)
      if bench.pauses(step + 1):
        before, done = bench.look(arm, state), len(supervisor.decisions)
        state = supervisor.settle(step + 1, state, metrics)
        new = [decision.action for _, decision in supervisor.decisions[done:]]
        if new and all(action.at_pause for action in new):
          jumps.append(bench.look(arm, state) - before)
  except FloatingPointError:  # the supervisor gives up; or the last weights are not finite
    stopped = int(state.step) < num_steps
  finally:
    hooks.unregister(hook)
  loss, finite = bench.score(arm, state)
  values = dict(zip(arm.names, np.stack(jax.device_get(rows)).T, strict=True))
  return {
    "arm": arm.name,
    "scenario": scenario,
    "seed": seed,
    "onset": draw.onset,
    "severity": draw.severity,
    "loss": loss,
    "finite": finite,
    "steps": num_steps,
    **_reactions(values, draw.onset),
    **(_balance(values, draw.onset) | {"jumps": jumps} if bench.cfg.moe.num_experts else {}),
    "findings": [
      [look.reading.step, found.cause, found.confidence]
      for look in looks
      if (found := look.judgement.finding)
    ],
    "verdicts": [look.judgement.outcome[:2] for look in looks if look.judgement.outcome],
    **_decisions(supervisor),
    "stopped": stopped,
    "secs": round(time.perf_counter() - began, 2),
  }


def _again(
  arm: Arm, memory: Any, batch: Batch, fault: Fault, state: TrainState
) -> tuple[TrainState, StepMetrics]:
  state, _, metrics = arm.step(state, memory, batch, fault)
  return state, metrics


def _reactions(metrics: dict[str, np.ndarray], onset: int) -> Record:
  """Whether and when the arm did something; empty for arms that do not say."""
  if set(RULE_METRICS) <= metrics.keys():
    skipped = metrics["rule/skipped"] > 0
    acted = skipped | (metrics["rule/rate"] != 1.0)
  elif set(REFLEX_METRICS) <= metrics.keys():
    skipped = metrics["reflex/skipped"] > 0
    acted = skipped | (metrics["reflex/grad_scale"] < 1) | (metrics["reflex/update_scale"] < 1)
  else:
    return {}
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


def _decisions(supervisor: Supervisor | NoSupervisor) -> Record:
  """What the supervisor did; nothing if there is none."""
  taken = supervisor.decisions
  is_cut = lambda a: isinstance(a, SetLearningRateScale) and a.scale < a.before
  return {
    "replayed": supervisor.replayed,
    "decisions": [[step, d.id, d.cause, d.confidence, d.action.to_json()] for step, d in taken],
    "rollbacks": sum(isinstance(d.action, Rollback) for _, d in taken),
    "cuts": sum(is_cut(d.action) and d.cause != "harm" for _, d in taken),
    "undone": sum(d.cause == "harm" for _, d in taken),
  }


def missing(suite: Suite, results: Results) -> Iterator[tuple[str, int, list[str]]]:
  """Arm, seed and scenarios that are not done yet."""
  for arm, seed in itertools.product(suite.arms, suite.seeds):
    left = [s for s in suite.scenarios if (arm, s, seed) not in results.records]
    if left:
      yield arm, seed, left


def run_suite(suite: Suite, path: Path) -> Results:
  """Run what is missing in the results file; one compilation an arm."""
  with jax.set_mesh(make_mesh(from_config_dict(base_config()), jax.devices()[:1])):
    bench = Bench(suite)
    results = Results(path, bench.protocol)
    build = functools.cache(lambda name: build_arm(name, bench.cfg))
    for name, seed, scenarios in missing(suite, results):
      arm = build(name)
      start = init_state(
        dataclasses.replace(arm.program.cfg, seed=seed), arm.program.num, arm.program.optimizer
      )
      for scenario in scenarios:
        copy = jax.tree.map(lambda x: jnp.array(x, copy=True), start)
        record = run(bench, arm, scenario, seed, copy)
        results.add(record)
        logging.info(
          "%-16s %-16s seed %-3d loss %.4f (%.1f s)",
          name, scenario, seed, record["loss"], record["secs"],
        )  # fmt: skip
  return results
