"""All runs of a suite, one after the other."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from ats_jax.config import base_config, from_config_dict
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import init_state
from ats_jax.step.state import TrainState
from lab.faults.arms import ARMS, build_arm
from lab.faults.audit import AUDITED
from lab.faults.bench import Bench, Suite
from lab.faults.domains import DOMAINS
from lab.faults.results import Key, Results
from lab.faults.scenarios import SCENARIOS
from lab.faults.single import run

COSTS = {"rewind": 1.5, "ours": 2.0}  # of a run, those of `clip`
TUNING_SEEDS, HELD_OUT_SEEDS = range(10), range(100, 110)


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
SMOKE_FAULTS = ("schedule_x30_burst", "noise_burst", "nan_gradient", "nan_weight", "repeats")
SMOKE_CONTROLS = ("clean", "domain_switch")
# Noise that a run meets; nothing else of the first suites comes through a door that production has.
NOISE = ("noise_burst", "noise_share", "shuffled_targets", "repeats")
LEGITIMATE = ("clean", "domain_switch", "small_batch", "length_jump")
AUDIT = Suite(
  ("clip", "oracle", "skip_step", "rewind", "ours"),
  (*LEGITIMATE, *(name for name in AUDITED if name != "long_clean"), *NOISE),
  tuple(range(600, 605)),
  pause_every=100,
  restarts=True,
  only=(("oracle", NOISE),),  # of all else it makes a clean run
  domains=tuple(DOMAINS),
)
AUDIT_SMOKE = ("clean", "minority_batch_10", "flip_weight_b30", "schedule_x30_burst")
LONG = Suite(
  ("clip", "ours"),
  ("long_clean",),
  tuple(range(600, 610)),
  (("num_steps", 2000),),
  pause_every=100,
  restarts=True,
)
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
  "audit": AUDIT,
  "audit_smoke": dataclasses.replace(
    AUDIT, arms=("clip", "ours"), scenarios=AUDIT_SMOKE, seeds=(0,), settings=(("num_steps", 120),)
  ),
  "audit_tune": dataclasses.replace(AUDIT, seeds=tuple(range(5))),
  "audit_long": LONG,
  "audit_long_tune": dataclasses.replace(LONG, seeds=tuple(range(10))),
}


def missing(suite: Suite, results: Results) -> list[Key]:
  """Runs that are not done yet: those of an arm together, and of them those of a seed."""
  only = dict(suite.only)
  return [
    key
    for arm in suite.arms
    for seed in suite.seeds
    for scenario in suite.scenarios
    if scenario in only.get(arm, suite.scenarios)
    and (key := (arm, scenario, seed)) not in results.records
  ]


def stretch(keys: list[Key], part: int, parts: int) -> list[Key]:
  """Part `part` (0-based) of about equal cost; together, a stretch has few arms to compile."""
  costs = np.array([COSTS.get(arm, 1.0) for arm, _, _ in keys])
  before = np.cumsum(costs) - costs
  which = before * parts // np.sum(costs)
  return [key for key, number in zip(keys, which, strict=True) if number == part]


def run_suite(suite: Suite, path: Path, part: tuple[int, int] | None = None) -> Results:
  """Run what is missing in the results file; one compilation an arm.

  Args:
    suite: what is run.
    path: of the results.
    part: which of how many parts of what is missing there; that part has a file of its own.
  """
  with jax.set_mesh(make_mesh(from_config_dict(base_config()), jax.devices()[:1])):
    bench = Bench(suite)
    results = Results(path, bench.protocol)
    keys = missing(suite, results)
    if part is not None:
      results = Results(part_file(path, part[0]), bench.protocol)
      keys = [key for key in stretch(keys, *part) if key not in results.records]
    build = functools.cache(lambda name: build_arm(name, bench.cfg))

    @functools.lru_cache(maxsize=1)
    def start(name: str, seed: int) -> TrainState:
      arm = build(name)
      cfg = dataclasses.replace(arm.program.cfg, seed=seed)
      return init_state(cfg, arm.program.num, arm.program.optimizer)

    for name, scenario, seed in keys:
      copy = jax.tree.map(lambda x: jnp.array(x, copy=True), start(name, seed))
      record = run(bench, build(name), scenario, seed, copy)
      results.add(record | bench.made_by)
      logging.info(
        "%-16s %-16s seed %-3d loss %.4f (%.1f s)",
        name, scenario, seed, record["loss"], record["secs"],
      )  # fmt: skip
  return results


def part_file(path: Path, part: int) -> Path:
  """Where a part of a suite's runs is until all are done."""
  return path.with_name(f"{path.name}.part{part}")
