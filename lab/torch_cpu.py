r"""Step time on the CPU against the same model in PyTorch, eager and compiled, in one run.

Each is a process of its own; they take turns, a few steps each, on the same cores.
All start from the same weights and see the same tokens, and their first losses must agree. Prints
a table for docs/reference/performance.md: medians of all steps, and the ratio of times in each
round (median, lowest and highest of the rounds). On a machine with other work, --clock=cpu counts
the time that the process had a core; it is a step's time where there is one core.
Command: pip install torch
  python -m lab.torch_cpu [--cores=0,1] [--rounds=10] [--clock=cpu]
"""

import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from absl import app, flags

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.build import resolve
from lab.runs import markdown

SHAPES = {
  "debug": dict(num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, d_ff=384, vocab_size=1024),
  "20m": dict(num_layers=9, d_model=384, num_heads=6, num_kv_heads=2, d_ff=1024, vocab_size=8192),
}
ROWS = {"debug": (16, 128), "20m": (4, 256)}  # batch, tokens of a row
CHECKED_STEPS, MAX_ERROR = 3, 1e-3  # nats
_CORES = flags.DEFINE_list("cores", None, "Cores to run on; default: all.")
_ROUNDS = flags.DEFINE_integer("rounds", 10, "Turns that each takes.", lower_bound=1)
_TURN = flags.DEFINE_integer("turn_steps", 5, "Steps of a turn.", lower_bound=1)
_CLOCK = flags.DEFINE_enum("clock", "wall", ["wall", "cpu"], "What is measured.")
_SIZES = flags.DEFINE_list("sizes", list(SHAPES), "Which models.")


def make_config(size: str) -> Config:
  """The run, in float32 with a constant learning rate."""
  config = base_config()
  config.model.update(SHAPES[size])
  config.data.batch_size, config.data.seq_len = ROWS[size]
  config.data.tokenizer, config.data.max_segments = "bytes", 1
  config.optimizer.schedule, config.optimizer.learning_rate = "constant", 1e-3
  config.precision.compute_dtype = "float32"
  return resolve(from_config_dict(config), config.model.vocab_size)


def jax_step(cfg: Config, weights: Path, unrolled: bool) -> Callable[[], float]:
  """The production step; writes its weights for the others."""
  import jax

  from ats_jax.data.batch import random_batch
  from ats_jax.sharding.mesh import make_mesh, to_global
  from ats_jax.step.program import make_program

  if unrolled:  # as PyTorch runs it
    step_config = dataclasses.replace(cfg.step, scan_unroll=cfg.model.num_layers)
    cfg = dataclasses.replace(cfg, step=step_config)
  mesh = make_mesh(cfg)
  jax.set_mesh(mesh)
  program = make_program(cfg)
  state = program.init()
  leaves = jax.tree_util.tree_leaves_with_path(state.model)
  named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
  bare = lambda name: name.removesuffix(".value").removesuffix(".weight")
  short = lambda name: bare(name.removeprefix("segments.0.layers.0."))
  np.savez(weights, **{short(name): np.asarray(leaf) for name, leaf in named.items()})
  rows = random_batch((1, cfg.data.batch_size, cfg.data.seq_len), cfg.model.vocab_size)
  batch, rules = to_global(rows, mesh), program.training_rules(1)
  train_step = program.compile_train_step(state, rules)

  def step() -> float:
    nonlocal state
    state, metrics = train_step(state, batch)
    return float(metrics["train/loss"])

  return step


def torch_step(cfg: Config, weights: Path, compiled: bool) -> Callable[[], float]:
  """The same in PyTorch."""
  import torch  # pyright: ignore[reportMissingImports]

  from ats_jax.data.batch import random_batch
  from lab import torch_decoder

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  model = torch_decoder.Decoder(cfg.model, cfg.data.seq_len)
  torch_decoder.load(model, dict(np.load(weights)))
  optimizer = torch_decoder.optimizer(model, cfg.optimizer)
  rows = random_batch((1, cfg.data.batch_size, cfg.data.seq_len), cfg.model.vocab_size)
  tokens, targets = (torch.from_numpy(rows[name][0]).long() for name in ("tokens", "targets"))
  loss_of = torch.compile(model, dynamic=False) if compiled else model

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.grad_clip)
    optimizer.step()
    return loss.item()

  return step


MAKERS = {
  "ats_jax": lambda *args: jax_step(*args, unrolled=False),
  "ats_jax, unrolled": lambda *args: jax_step(*args, unrolled=True),
  "torch eager": lambda *args: torch_step(*args, compiled=False),
  "torch.compile": lambda *args: torch_step(*args, compiled=True),
}


def worker(
  pipe: Connection, kind: str, size: str, weights: Path, cores: list[int], clock: str
) -> None:
  """Make the step, send its first losses, then seconds of as many steps as are asked for."""
  os.sched_setaffinity(0, cores)
  step = MAKERS[kind](make_config(size), weights)
  pipe.send([step() for _ in range(CHECKED_STEPS)])
  now = time.process_time if clock == "cpu" else time.perf_counter
  while count := pipe.recv():
    times = []
    for _ in range(count):
      began = now()
      step()
      times.append(now() - began)
    pipe.send(times)


def compare(
  size: str, cores: list[int], rounds: int, steps: int, clock: str
) -> dict[str, list[list[float]]]:
  """Seconds of each step, by kind and round.

  Raises:
    ValueError: if the losses of the first steps differ.
  """
  context, pipes, losses = multiprocessing.get_context("spawn"), {}, {}
  with TemporaryDirectory() as folder:
    for kind in MAKERS:  # one after the other: the first leaves the weights
      pipes[kind], theirs = context.Pipe()
      args = (theirs, kind, size, Path(folder, "weights.npz"), cores, clock)
      context.Process(target=worker, args=args, daemon=True).start()
      losses[kind] = np.array(pipes[kind].recv())
  error = max(np.abs(losses[kind] - losses["ats_jax"]).max() for kind in MAKERS)
  print(f"{size}: first losses {losses['ats_jax']}, largest difference {error:.1e}", flush=True)
  if not error < MAX_ERROR:
    raise ValueError(f"these are not the same model: {losses}")
  times = {kind: [] for kind in MAKERS}
  for _ in range(rounds):
    for kind, pipe in pipes.items():
      pipe.send(steps)
      times[kind].append(pipe.recv())
  for pipe in pipes.values():
    pipe.send(0)
  return times


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  cores = [int(c) for c in _CORES.value] if _CORES.value else sorted(os.sched_getaffinity(0))
  rows = []
  for size in _SIZES.value:
    times = compare(size, cores, _ROUNDS.value, _TURN.value, _CLOCK.value)
    median = {kind: [statistics.median(r) for r in turns] for kind, turns in times.items()}
    for kind, turns in times.items():
      ratios = [a / b for a, b in zip(median[kind], median["ats_jax"], strict=True)]
      flat = np.concatenate(turns)
      rows.append(
        [
          size,
          kind,
          f"{1e3 * np.median(flat):.1f}",
          f"{1e3 * np.percentile(flat, 10):.1f} to {1e3 * np.percentile(flat, 90):.1f}",
          f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
      )
  print(f"{len(cores)} core(s), {_CLOCK.value} time, load {os.getloadavg()}")
  header = ["model", "", "ms a step", "10 to 90 %", "time over that of ats_jax"]
  print(markdown(header, rows))


if __name__ == "__main__":
  app.run(main)
