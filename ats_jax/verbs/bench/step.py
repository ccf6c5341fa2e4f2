"""Speed of a config's training step on random rows.

  ats-jax bench --config=dense_1_5b --steps=20
  ats-jax bench --profile --config.step.remat=full

Nothing is read or kept; the program is the one that `ats_jax train` runs. Prints a line a phase and
one JSON line with everything: `step_secs` where the host waits for each step (the median),
`queued_step_secs` where it waits for the last one only, as in training (the mean). With --profile
first where the time of two more steps went.
"""

import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import jax
from absl import flags, logging

from ats_jax.cluster import runtime
from ats_jax.config import Config
from ats_jax.data.batch import random_batch
from ats_jax.metrics.memory import GIB, memory_metrics
from ats_jax.metrics.peaks import peak_flops
from ats_jax.metrics.profiler import summarise_trace
from ats_jax.metrics.throughput import mfu
from ats_jax.model.numerics import unroll_of
from ats_jax.ops.requirements import this_device, with_compute_dtype
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.sharding.mesh import local_rows, make_mesh, on_mesh, to_global
from ats_jax.step.program import make_program, predicted_bytes
from ats_jax.verbs import cli

WARMUP_STEPS = 3
# The planner was 6 % too low to 7 % too high, but once 13 too low (lab/planned_memory.py).
SLACK = 1.1
PROFILED_STEPS = 2


def measure(
  cfg: Config, *, steps: int, segments: int, profile: bool = False, memory_gib: float = 0.0
) -> dict[str, object]:
  """Compile and run the training step of `cfg`; return what was measured.

  Args:
    cfg: the run; without `model.vocab_size`, 'bytes' and 'bpe' tokenizers tell theirs.
    steps: timed steps, after a few untimed ones: waited for one by one, then as many queued.
    segments: documents in each row.
    profile: trace two more steps and log the kernels that took longest.
    memory_gib: of a device; 0 = what it says itself.

  Raises:
    ValueError: if it cannot run: for its settings, or as it does not fit. The planner's estimate
      decides before anything is allocated, the compiler's plan before the first step.
  """
  if not 1 <= segments <= cfg.data.max_segments:
    raise ValueError(
      f"bench: --segments={segments} is outside [1, data.max_segments={cfg.data.max_segments}]."
    )
  cfg = resolve_without_data(with_compute_dtype(cfg, this_device()))
  limit = memory_gib or memory_metrics().get("memory/device_limit_gib", math.inf)
  planned = planned_bytes(describe(cfg, jax.device_count())) / GIB
  _require_memory("the planner estimates", planned, SLACK * limit)
  mesh = make_mesh(cfg)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    logging.info("%s", ", ".join(map(str, program.choices)))
    state = jax.block_until_ready(program.init())
    began = time.perf_counter()
    train_step = program.compile_train_step(state, program.training_rules(cfg.num_steps))
    compile_secs = time.perf_counter() - began
    predicted = predicted_bytes(train_step) / GIB
    _require_memory("the compiled step needs", predicted, limit)
    rows = local_rows(mesh, cfg.data.batch_size // cfg.step.accum_steps)
    shape = (cfg.step.accum_steps, len(rows), cfg.data.seq_len)
    batch = to_global(random_batch(shape, cfg.model.vocab_size, segments), mesh)
    times, losses = [], []
    for _ in range(WARMUP_STEPS + steps):
      began = time.perf_counter()
      state, metrics = train_step(state, batch)
      losses.append(float(metrics["train/loss"]))
      times.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(steps):
      state, _ = train_step(state, batch)
    jax.block_until_ready(state)
    queued_secs = (time.perf_counter() - began) / steps
    if profile:
      with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
          for _ in range(PROFILED_STEPS):
            state, _ = train_step(state, batch)
          jax.block_until_ready(state)
        logging.info("kernels of %d steps:\n%s", PROFILED_STEPS, summarise_trace(Path(folder)))
  step_secs = statistics.median(times[WARMUP_STEPS:])
  tokens = cfg.data.batch_size * cfg.data.seq_len
  tokens_per_sec = tokens / step_secs
  kind, devices = jax.devices()[0].device_kind, jax.device_count()
  peak = peak_flops(kind, cfg.precision.compute_dtype)
  return {
    "jax": jax.__version__,
    "device": f"{devices} x {kind}",
    "parameters": program.counts.parameters,
    "remat": cfg.step.remat,
    "scan_unroll": unroll_of(cfg, program.device.platform),
    "compiler_options": program.options,
    "segments": segments,
    "compile_secs": compile_secs,
    "step_secs": step_secs,
    "tokens_per_sec": tokens_per_sec,
    "queued_step_secs": queued_secs,
    "queued_tokens_per_sec": tokens / queued_secs,
    "model_flops_per_sec": program.counts.flops_causal * tokens_per_sec,
    "mfu": mfu(program.counts.flops_causal, tokens_per_sec, devices, peak),
    "mfu_6n": mfu(program.counts.flops_full, tokens_per_sec, devices, peak),
    "loss": losses[-1],
    "memory/planned_gib": planned,
    "memory/predicted_gib": predicted,
    **memory_metrics(),
  }


def _require_memory(who: str, need: float, limit: float) -> None:
  if need > limit:
    raise ValueError(
      f"does not fit: {who} {need:,.1f} GiB a device, the limit is {limit:,.1f}. Use a smaller "
      "micro-batch (step.accum_steps), step.remat=full, or more devices."
    )


FLAGS = flags.FlagValues()


def define_flags(
  flag_values: flags.FlagValues,
) -> tuple[cli.ConfigFlag, tuple[flags.FlagHolder, ...]]:
  """Define what a measurement takes: a config; steps, segments and memory_gib."""
  return cli.ConfigFlag(flag_values), (
    flags.DEFINE_integer("steps", 10, "Timed steps.", lower_bound=1, flag_values=flag_values),
    flags.DEFINE_integer(
      "segments", 1, "Documents in a row.", lower_bound=1, flag_values=flag_values
    ),
    flags.DEFINE_float(
      "memory_gib",
      0.0,
      "Memory of a device in GiB; 0 = what it says itself.",
      lower_bound=0.0,
      flag_values=flag_values,
    ),
  )


_CONFIG, _OPTIONS = define_flags(FLAGS)
_PROFILE = flags.DEFINE_bool("profile", False, "Say which kernels took longest.", flag_values=FLAGS)


def main(argv: list[str]) -> None:
  """Print the measurement."""
  del argv
  cfg, options = _CONFIG.value, {flag.name: flag.value for flag in _OPTIONS}
  with runtime.configured(cfg):
    print(json.dumps(measure(cfg, **options, profile=_PROFILE.value)))


COMMAND = cli.Command(main, FLAGS, __doc__)
