r"""What the orchestrator costs: the time of a step with it and without, in turns, on one machine.

One state is trained on random rows by two programs of `ats_jax train` in turns: with the
orchestrator in `--mode`, its looks, its probe and its snapshots, and with `orchestrator.mode=off`.
Each turn is `--window` steps that end with a wait, so that what runs beside the steps is counted:
looks and snapshots fall into the turns as their settings say. The first snapshots take longer, so
`--warm_up` turns of each come first. Prints a table, with how long each step takes to compile.
Command: python -m lab.orchestrator_cost --config=configs/dense_1_5b.py [--mode=act] [--window=10] \
  [--turns=20] [--config.step.remat=names]
"""

import dataclasses
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from ats_jax.cluster import runtime
from ats_jax.config import Config
from ats_jax.data.batch import Batch, random_batch
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.sharding.mesh import local_rows, make_mesh, to_global
from ats_jax.step.program import Program, make_program, predicted_bytes
from ats_jax.step.state import TrainState
from ats_jax.verbs import cli
from lab.runs import markdown

_CONFIG = cli.ConfigFlag()
_MODE = flags.DEFINE_enum("mode", "act", ["act", "observe"], "Of the orchestrator.")
_WINDOW = flags.DEFINE_integer("window", 10, "Steps of a turn.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 20, "Turns of each.", lower_bound=2)
PROBE_TOKENS = 64 * 256
_WARM_UP = flags.DEFINE_integer("warm_up", 2, "Turns of each before those that count.")


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
  supervisor: Supervisor | NoSupervisor
  compile_secs: float
  gib: float


def begin(cfg: Config, mode: str, probe: Batch, state: TrainState | None) -> tuple[Run, TrainState]:
  """Compile, and take the first snapshot; the state is as this program has it."""
  program = make_program(
    dataclasses.replace(cfg, orchestrator=dataclasses.replace(cfg.orchestrator, mode=mode))
  )
  state = program.init() if state is None else dataclasses.replace(state, control=None, reflex=None)
  began = time.perf_counter()
  step = program.compile_train_step(state, program.training_rules(cfg.num_steps))
  secs = time.perf_counter() - began
  supervisor = NoSupervisor() if mode == "off" else Supervisor(program, probe)
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
  cfg = resolve_without_data(_CONFIG.value)
  runtime.configure(cfg)
  mesh = make_mesh(cfg)
  with jax.set_mesh(mesh):
    rows = local_rows(mesh, cfg.data.batch_size // cfg.step.accum_steps)
    shape = (cfg.step.accum_steps, len(rows), cfg.data.seq_len)
    batch = to_global(random_batch(shape, cfg.model.vocab_size), mesh)
    probe = to_global(
      random_batch((PROBE_TOKENS // cfg.data.seq_len, cfg.data.seq_len), cfg.model.vocab_size), mesh
    )
    runs = {}
    with_it = _MODE.value
    runs[with_it], state = begin(cfg, with_it, probe, None)
    control, reflex = state.control, state.reflex
    runs["off"], state = begin(cfg, "off", probe, state)
    secs: dict[str, list[float]] = {mode: [] for mode in runs}
    for number in range(_WARM_UP.value + _TURNS.value):
      others = _WINDOW.value if number else 0
      for mode, run in runs.items():
        if mode == with_it:
          assert reflex is not None
          # What the other program did in its turn is none of its business.
          own = {"knows": jnp.zeros_like(reflex.knows), "updates": reflex.updates + others}
          count = jnp.full_like(state.step, number * _WINDOW.value)
          reflex = reflex._replace(**own)
          state = dataclasses.replace(state, step=count, control=control, reflex=reflex)
        state, took = turn(run, state, number * _WINDOW.value, batch)
        if mode == with_it:
          control, reflex = state.control, state.reflex
          state = dataclasses.replace(state, control=None, reflex=None)
        print(mode, number - _WARM_UP.value, f"{1e3 * took:.2f} ms", flush=True)
        if number >= _WARM_UP.value:
          secs[mode].append(took)
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
  pairs = np.divide(secs[with_it], secs["off"])
  looks = _TURNS.value * _WINDOW.value / cfg.orchestrator.check_interval
  decisions = len(runs[with_it].supervisor.decisions)
  whole = sum(secs[with_it]) / sum(secs["off"]) - 1.0
  print(
    f"with it a step takes {100 * (np.median(pairs) - 1):+.2f} % (median of {len(pairs)} turns; "
    f"{', '.join(f'{100 * (pair - 1):+.2f}' for pair in pairs)}), all of them together "
    f"{100 * whole:+.2f} % with {looks:g} looks; {decisions} decisions."
  )


if __name__ == "__main__":
  cli.run(main)
