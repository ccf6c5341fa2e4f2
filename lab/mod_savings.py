"""Does skipping layers save work? A training step with and without mixture of depths.

python -m lab.mod_savings [--config=FILE] [--steps=10]
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

from ats_jax.cluster import runtime
from ats_jax.config import Config, from_config_dict
from ats_jax.config.schema import MoDConfig
from ats_jax.config.schema.setting import Table
from ats_jax.data.batch import random_batch
from ats_jax.planner.abstract import batch_on_mesh, resolve_without_data
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.program import Program, make_program
from ats_jax.verbs import cli
from lab.flops import matmul_flops

CAPACITIES = (0.125, 0.25, 0.5)
EVERY = {"alternate": 2, "all": 1}  # which layers skip
WARMUP_STEPS = 2

_CONFIG = cli.ConfigFlag()
_STEPS = flags.DEFINE_integer(
  "steps", 10, "Timed steps of each program.", lower_bound=1, allow_override=True
)


def default_config() -> Config:
  """A model of 6M parameters, nearly all in its layers; unrolled, so that XLA counts them all."""
  return from_config_dict(
    {
      "compilation_cache": "off",
      "model": dict(num_layers=8, d_model=256, num_heads=4, num_kv_heads=2, d_ff=768),
      "data": dict(seq_len=256, batch_size=4, tokenizer="bytes"),
      "precision": dict(compute_dtype="float32"),
      "step": dict(scan_unroll=8),
    }
  )


def plan_with(cfg: Config, mod: MoDConfig) -> Program:
  """How `cfg` with another `mod` section computes. Call under its mesh."""
  return make_program(resolve_without_data(dataclasses.replace(cfg, mod=mod)))


@dataclasses.dataclass(frozen=True)
class Saving:
  """FLOPs that a step saves against the dense one, as shares of the latter.

  Attributes:
    counted: matmuls of the traced programs.
    predicted: what `model.count` says.
  """

  counted: float
  predicted: float


def saving(dense: Program, mod: Program) -> Saving:
  """Compare two plans that differ in `mod` only."""
  before, after = _step_flops(dense), _step_flops(mod)
  # The convention of whole attention, which is what the reference computes; the input embedding
  # falls out of the difference.
  a_token = dense.counts.flops_full - mod.counts.flops_full
  tokens = mod.cfg.data.batch_size * mod.cfg.data.seq_len
  return Saving(counted=1 - after / before, predicted=tokens * a_token / before)


def _step_flops(program: Program) -> int:
  """Of the reference implementations, where every matmul shows."""
  ops = dataclasses.replace(program.cfg.ops, kernels=Table(attention="xla", grouped_matmul="xla"))
  program = make_program(dataclasses.replace(program.cfg, ops=ops))
  data, accum = program.cfg.data, program.cfg.step.accum_steps
  batch = batch_on_mesh(accum, data.batch_size // accum, data.seq_len)
  rules = program.training_rules(program.cfg.num_steps)
  return matmul_flops(program.train_step, program.init(abstract=True), batch, rules)


class Run:
  """A state and its compiled step on random rows.

  Attributes:
    compiled_flops: of the compiled step by XLA's count, which adds elementwise work and counts the
      body of a loop once.
  """

  def __init__(self, program: Program):
    """Compiles; under the mesh."""
    data, accum = program.cfg.data, program.cfg.step.accum_steps
    shape = (accum, data.batch_size // accum, data.seq_len)
    batch = random_batch(shape, program.cfg.model.vocab_size)
    self._state = program.init()
    self._batch = to_global(batch, jax.sharding.get_mesh())
    rules = program.training_rules(program.cfg.num_steps)
    self._step = program.compile_train_step(self._state, rules)
    costs: Any = self._step.cost_analysis()  # not every backend has one
    self.compiled_flops = costs["flops"]

  def step(self) -> float:
    """Take a step; its seconds."""
    began = time.perf_counter()
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready(metrics)
    return time.perf_counter() - began


def median_seconds(runs: list[Run], steps: int) -> list[float]:
  """Of a step of each run, taken in turn so that a busy machine slows all alike."""
  times = [[run.step() for run in runs] for _ in range(WARMUP_STEPS + steps)]
  return [statistics.median(of_run) for of_run in zip(*times[WARMUP_STEPS:], strict=True)]


def report(cfg: Config, steps: int) -> Iterator[str]:
  """Lines of a table: shares of the dense step's FLOPs and time that are saved.

  Args:
    cfg: the run; its `mod` is replaced. XLA's count is shown if no loop runs over its layers.
    steps: timed, of each program.
  """
  line = "{:<10} {:>8} {:>8} {:>10} {:>6} {:>8} {:>9} {:>9} {:>8} {:>10}".format
  yield line(
    "layers", "capacity", "counted", "predicted", "ratio", "by XLA", "dense ms", "ms", "of time",
    "/ counted",
  )  # fmt: skip
  with jax.set_mesh(make_mesh(cfg)):
    dense = plan_with(cfg, MoDConfig())
    dense_run = Run(dense)
    for layers, every in EVERY.items():
      for capacity in CAPACITIES:
        mod = plan_with(cfg, MoDConfig(routing="learned", capacity=capacity, every=every))
        flops, run = saving(dense, mod), Run(mod)
        before, after = median_seconds([dense_run, run], steps)
        seconds = 1 - after / before
        by_xla = 1 - run.compiled_flops / dense_run.compiled_flops
        yield line(
          layers,
          f"{capacity:.1%}",
          f"{flops.counted:.1%}",
          f"{flops.predicted:.1%}",
          f"{flops.counted / flops.predicted:.3f}",
          f"{by_xla:.1%}" if cfg.step.scan_unroll >= cfg.model.num_layers else "-",
          f"{before * 1e3:.1f}",
          f"{after * 1e3:.1f}",
          f"{seconds:.1%}",
          f"{seconds / flops.counted:.2f}",
        )


def main(argv: list[str]) -> None:
  """Print what each way to skip saves."""
  del argv
  cfg = _CONFIG.value if flags.FLAGS["config"].present else default_config()
  runtime.configure(cfg)
  for line in report(cfg, _STEPS.value):
    print(line, flush=True)


if __name__ == "__main__":
  cli.run(main)
