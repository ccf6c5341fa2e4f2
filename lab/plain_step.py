r"""The baseline of the speed ratios: a training step in plain JAX, of the shape of a config.

The step is `plain_decoder.py`; rows are random tokens, on one device. Prints one JSON line: the
median of steps that the host waits for, tokens a second, and MFU as `ats_jax bench` counts it.
Command: python -m lab.plain_step --config=configs/dense_1_5b.py [--steps=10] \
  [--config.step.remat=dots]
"""

import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
from absl import flags

from ats_jax.config import Config
from ats_jax.data.batch import random_batch
from ats_jax.metrics.memory import memory_metrics
from ats_jax.metrics.peaks import peak_flops
from ats_jax.metrics.throughput import mfu
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.planner.describe import describe
from ats_jax.verbs import cli
from lab.plain_decoder import check, first_state, init, make_step

WARMUP_STEPS = 3
_CONFIG = cli.ConfigFlag()
_STEPS = flags.DEFINE_integer("steps", 10, "Timed steps.", lower_bound=1)


def measure(cfg: Config, steps: int) -> dict[str, object]:
  """Time `steps` steps on random tokens; one device."""
  shape = (cfg.data.batch_size, cfg.data.seq_len)
  rows = random_batch(shape, cfg.model.vocab_size)
  tokens, targets = (jnp.asarray(rows[name]) for name in ("tokens", "targets"))
  state = first_state(cfg, jax.jit(functools.partial(init, cfg))(jax.random.key(cfg.seed)))
  began = time.perf_counter()
  step = make_step(cfg).lower(*state, tokens, targets).compile()
  compile_secs = time.perf_counter() - began
  times, losses = [], []
  for _ in range(WARMUP_STEPS + steps):
    began = time.perf_counter()
    *state, loss, _ = step(*state, tokens, targets)
    losses.append(float(loss))
    times.append(time.perf_counter() - began)
  secs = statistics.median(times[WARMUP_STEPS:])
  tokens_per_sec = tokens.size / secs
  flops = describe(cfg, 1)["flops_per_token"]
  device = jax.devices()[0].device_kind
  peak = peak_flops(device, cfg.precision.compute_dtype)
  return {
    "jax": jax.__version__,
    "device": device,
    "parameters": sum(p.size for p in jax.tree.leaves(state[0])),
    "compile_secs": compile_secs,
    "step_secs": secs,
    "tokens_per_sec": tokens_per_sec,
    "mfu": mfu(flops["training"], tokens_per_sec, 1, peak),
    "mfu_6n": mfu(flops["training_6n"], tokens_per_sec, 1, peak),
    "loss": losses[-1],
    **memory_metrics(),
  }


def main(argv: list[str]) -> None:
  """Print the measurement."""
  del argv
  cfg = resolve_without_data(_CONFIG.value)
  check(cfg)
  print(json.dumps(measure(cfg, _STEPS.value)))


if __name__ == "__main__":
  cli.run(main)
