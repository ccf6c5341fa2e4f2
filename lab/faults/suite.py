"""All runs of a suite: one after the other, or spread over processes."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from absl import logging

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema import OrchestratorConfig
from ats_jax.sharding.mesh import make_mesh
from lab.faults.arms import ARMS, OBSERVING
from lab.faults.bench import Bench, Suite
from lab.faults.course import prefixes, run
from lab.faults.results import Key, Results
from lab.faults.scenarios import FLIPS, SCENARIOS, SILENT

TUNING_SEEDS, HELD_OUT_SEEDS = range(10), range(100, 110)
SMOKE = ("nan_weight", "nan_gradient", "garbage_burst", "computed_x30_burst", "clean",
         "script_batch_10")  # fmt: skip
LONG_FAULTS = ("scaled_matrix", "update_scale", "matmul_shift", "wrong_targets",
               "computed_x30_burst", "clean")  # fmt: skip
LARGER_FAULTS = ("scaled_matrix", "wrong_targets", "computed_x30_burst", "clean")
LOUD = tuple(name for name in SCENARIOS if name not in (*SILENT, "matmul_flip"))
# 26M parameters for one GPU, watched as a run is that leaves the orchestrator's settings alone.
ON_GPU = (
  ("model.num_layers", 8),
  ("model.d_model", 512),
  ("model.num_heads", 8),
  ("model.num_kv_heads", 8),
  ("model.d_ff", 1408),
  ("data.seq_len", 512),
  ("optimizer.learning_rate", 1e-3),
  ("optimizer.warmup_steps", 200),
  ("orchestrator.check_interval", OrchestratorConfig.check_interval),
  ("orchestrator.snapshot_interval", OrchestratorConfig.snapshot_interval),
  ("precision.compute_dtype", "bfloat16"),
)
LARGER = (
  *ON_GPU,  # below, 365M
  ("model.num_layers", 24),
  ("model.d_model", 1024),
  ("model.num_heads", 16),
  ("model.num_kv_heads", 16),
  ("model.d_ff", 3584),
  ("optimizer.learning_rate", 3e-4),
)
SUITES = {
  "smoke": Suite(("clip", "rewind", "ours"), SMOKE, (0,), (("num_steps", 200),)),
  "tune": Suite(tuple(ARMS), LOUD, tuple(TUNING_SEEDS)),
  "held_out": Suite(tuple(ARMS), LOUD, tuple(HELD_OUT_SEEDS)),
  "flips": Suite(
    ("clip", "skip_step", "repeat_step", "rewind", "ours"), ("clean", *FLIPS), (*range(100, 105),)
  ),
  "silent": Suite((OBSERVING,), ("clean", *SILENT), (100, 101, 102)),
  "long_clean": Suite(
    ("clip", "ours"), ("clean",), (100, 101), (("num_steps", 20_000), *ON_GPU), splits=True
  ),
  "long_faults": Suite(
    ("clip", "rewind", "ours"), LONG_FAULTS, (100,), (("num_steps", 5_000), *ON_GPU), splits=True
  ),
  "larger_faults": Suite(
    ("clip", "rewind", "ours"), LARGER_FAULTS, (100,), (("num_steps", 2_000), *LARGER), splits=True
  ),
}
# With more than one thread a process, they wait for each other.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def keys(suite: Suite, part: int = 0, parts: int = 1) -> list[Key]:
  """A part (0-based) of a suite's runs: those of an arm and seed together, few arms in each."""
  groups = [(arm, seed) for arm in suite.arms for seed in suite.seeds]
  own = groups[part * len(groups) // parts : (part + 1) * len(groups) // parts]
  return [(arm, scenario, seed) for arm, seed in own for scenario in suite.scenarios]


def run_suite(suite: Suite, path: Path, part: int = 0, parts: int = 1) -> None:
  """Make the runs of a part of a suite that its results file does not have."""
  with jax.set_mesh(make_mesh(from_config_dict(base_config()), jax.devices()[:1])):
    bench = Bench(suite)
    results = Results(path, bench.protocol)
    begun = functools.lru_cache(maxsize=1)(functools.partial(prefixes, bench))
    for name, scenario, seed in keys(suite, part, parts):
      if (name, scenario, seed) in results.records:
        continue
      record = run(bench, name, scenario, seed, begun(name, seed))
      results.add(record | bench.made_by)
      logging.info("%s, %s, seed %d: loss %.4f", name, scenario, seed, record["loss"])


def spread(path: Path, processes: int) -> None:
  """Run this command in so many processes of one core each; the log of each is beside the results.

  Raises:
    ValueError: if one of them fails; what was made is kept.
  """
  cores = sorted(os.sched_getaffinity(0))
  flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
  own = [arg for arg in sys.argv[1:] if not arg.startswith("--processes")]

  def one(part: int) -> str:
    core = ["taskset", "--cpu-list", str(cores[part % len(cores)])]
    command = [*core, sys.executable, "-m", "lab.faults", *own, f"--part={part}/{processes}"]
    log = path.with_name(f"{path.name}.{part}.log")
    with log.open("w") as file:
      done = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    return str(log) if done.returncode else ""

  with ThreadPoolExecutor(processes) as pool:
    failed = [log for log in pool.map(one, range(processes)) if log]
  if failed:
    raise ValueError(f"processes failed: see {', '.join(failed)}. The same command goes on.")
