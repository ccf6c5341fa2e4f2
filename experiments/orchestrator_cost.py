r"""What the orchestrator costs: the time of a step with it and without, in turns, on one machine.

Both runs are trained on random rows by the program of `ats_jax train`: the one with
`orchestrator.mode=act`, its looks, its probe and its snapshots, the other with `off`. Each turn is
`--window` steps that end with a wait, so that what runs beside the steps is counted: with
`orchestrator.check_interval` and `snapshot_interval` of as many, one look and one snapshot. Turns
before those that count fill the host memory of the three snapshots, which takes seconds for some of
them, most likely to get it: later ones use it again. Both states are on the device at once. Prints
a table, with how long each step takes to compile.
Command: python experiments/orchestrator_cost.py --config=configs/dense_1_5b.py [--window=100] \
  [--turns=4] [--config.step.remat=names]
"""

import dataclasses
import math
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from runs import markdown

from ats_jax import cli, runtime
from ats_jax.config import Config, from_config_dict
from ats_jax.data.batch import Batch, random_batch
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.snapshots import COPIES
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.sharding.mesh import local_rows, make_mesh, to_global
from ats_jax.step.program import Program, make_program, predicted_bytes
from ats_jax.step.state import TrainState

_CONFIG = cli.define_config_flag()
_WINDOW = flags.DEFINE_integer("window", 100, "Steps of a turn.", lower_bound=10)
_TURNS = flags.DEFINE_integer("turns", 4, "Turns of each.", lower_bound=2)


class Run(NamedTuple):
  """One of the two.

  Attributes:
    program: how it computes.
    step: compiled.
    supervisor: does nothing in the run without it.
    compile_secs: of the step.
    gib: what the step needs by the compiler's plan.
  """

  program: Program
  step: jax.stages.Compiled
  supervisor: Supervisor
  compile_secs: float
  gib: float


def begin(cfg: Config, mode: str, probe: Batch) -> tuple[Run, TrainState]:
  """Compile, and take the first snapshot."""
  program = make_program(
    dataclasses.replace(cfg, orchestrator=dataclasses.replace(cfg.orchestrator, mode=mode))
  )
  state = program.init()
  began = time.perf_counter()
  step = program.compile_train_step(state, program.training_rules(cfg.num_steps))
  secs = time.perf_counter() - began
  supervisor = Supervisor(program, probe)
  supervisor.start(0, state)
  return Run(program, step, supervisor, secs, predicted_bytes(step) / 2**30), state


def turn(run: Run, state: TrainState, first: int, batch: Batch) -> tuple[TrainState, float]:
  """Train `--window` steps after `first`; the state, and seconds a step."""
  jax.block_until_ready(state)
  began = time.perf_counter()
  for step in range(first + 1, first + _WINDOW.value + 1):
    state, metrics = run.step(state, batch)
    state = run.supervisor.after(step, state, metrics)
  jax.block_until_ready(state)
  return state, (time.perf_counter() - began) / _WINDOW.value


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  config = cli.require(_CONFIG.value, "config", "configs/dense_1_5b.py")
  cfg = resolve_without_data(from_config_dict(config))
  runtime.configure(cfg)
  mesh = make_mesh(cfg)
  with jax.set_mesh(mesh):
    rows = local_rows(mesh, cfg.data.batch_size // cfg.step.accum_steps)
    shape = (cfg.step.accum_steps, len(rows), cfg.data.seq_len)
    batch = to_global(random_batch(shape, cfg.model.vocab_size), mesh)
    probe = {name: x[0] for name, x in batch.items()}
    fill = COPIES * math.ceil(cfg.orchestrator.snapshot_interval / _WINDOW.value)
    warm_up = {"off": 1, "act": fill}
    runs, states = {}, {}
    for mode, turns in warm_up.items():
      runs[mode], states[mode] = begin(cfg, mode, probe)
      for number in range(turns):
        states[mode], took = turn(runs[mode], states[mode], number * _WINDOW.value, batch)
        print(mode, "warming up", f"{1e3 * took:.2f} ms", flush=True)
    secs: dict[str, list[float]] = {mode: [] for mode in runs}
    for number in range(1, _TURNS.value + 1):
      for mode, run in runs.items():
        first = (warm_up[mode] + number - 1) * _WINDOW.value
        states[mode], took = turn(run, states[mode], first, batch)
        secs[mode].append(took)
        print(mode, number, f"{1e3 * took:.2f} ms", flush=True)
  table = [
    [
      mode,
      f"{1e3 * statistics.median(secs[mode]):.2f}",
      f"{1e3 * min(secs[mode]):.2f} to {1e3 * max(secs[mode]):.2f}",
      f"{run.compile_secs:.1f}",
      f"{run.gib:.2f}",
    ]
    for mode, run in runs.items()
  ]
  print(markdown(["", "ms a step", "turns", "compiles in, s", "GiB of the step"], table))
  pairs = np.divide(secs["act"], secs["off"])
  looks = _WINDOW.value / cfg.orchestrator.check_interval
  print(
    f"with it a step takes {100 * (np.median(pairs) - 1):+.2f} % (turn by turn "
    f"{', '.join(f'{100 * (pair - 1):+.2f}' for pair in pairs)}); {looks:g} looks a turn, "
    f"{len(runs['act'].supervisor.decisions)} decisions."
  )


if __name__ == "__main__":
  cli.run(main)
