r"""Speed of a training step against the same step in PyTorch, eager and compiled, in one run.

All are in one process on one device, start from the same state and see the same batches; they take
turns, a few steps each, and their first losses must agree. Before that PyTorch is given JAX's
weights without a copy, and the addresses are compared. Prints a table for
docs/reference/performance.md: tokens a second (median of the rounds, lowest and highest), and the
ratio to JAX in each round.
Command: pip install torch
  python -m lab.torch_speed [--sizes=350m,moe] [--device=cuda] [--rounds=5]
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from absl import app, flags

from ats_jax.checkpoint import abstract_like
from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.data.batch import random_batch
from ats_jax.pytorch import weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.training import device as devices
from ats_jax.pytorch.training.device import LossScale
from ats_jax.pytorch.training.state import optimizer_of, shared_tensors, to_torch
from ats_jax.pytorch.training.step import Trainer, batch_on
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.program import make_program
from lab.runs import markdown

GQA = dict(num_heads=16, num_kv_heads=4)
SHAPES = {
  "toy": dict(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=512),
  "350m": dict(num_layers=24, d_model=1024, **GQA, d_ff=2816, vocab_size=32768),
  "moe": dict(num_layers=12, d_model=1024, **GQA, d_ff=2816, vocab_size=32768),
}
EXPERTS = {"moe": dict(num_experts=16, top_k=2, d_ff=1408)}
ROWS = {"toy": (4, 64), "350m": (16, 2048), "moe": (8, 2048)}  # batch, tokens of a row
MAX_ERROR = {"float32": 1e-3, "bfloat16": 3e-2}  # nats, of the first loss
_SIZES = flags.DEFINE_list("sizes", ["350m", "moe"], f"Which models: {', '.join(SHAPES)}.")
_DEVICE = flags.DEFINE_string("device", "cuda", "cuda, or cpu to try it.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns that each takes.", lower_bound=1)
_TURN = flags.DEFINE_integer("turn_steps", 5, "Steps of a turn.", lower_bound=1)
_COMPILED = flags.DEFINE_bool("compiled", True, "Also by torch.compile.")


def make_config(size: str, dtype: str) -> Config:
  """The run, with a constant learning rate."""
  config = base_config()
  config.model.update(SHAPES[size])
  config.moe.update(EXPERTS.get(size, {}))
  if size in EXPERTS:  # unrolled, JAX's step was not compiled after 105 s on an H100
    config.step.scan_unroll = 1
    config.step.compiler_options = {"xla_gpu_enable_triton_gemm": "false"}
  config.data.batch_size, config.data.seq_len = ROWS[size]
  config.data.tokenizer, config.data.max_segments = "bytes", 4
  config.optimizer.schedule, config.optimizer.learning_rate = "constant", 1e-4
  config.precision.compute_dtype = dtype
  return resolve(from_config_dict(config), config.model.vocab_size)


def compare(size: str) -> Iterator[list[str]]:
  """Rows of the table for one size."""
  where = devices.find_device(_DEVICE.value)
  dtype = "bfloat16" if where.type == "cuda" else "float32"
  cfg = make_config(size, dtype)
  mesh = make_mesh(cfg, jax.devices()[:1])
  with jax.set_mesh(mesh):
    program = make_program(cfg)
    state, abstract = program.init(), abstract_like(program.init(abstract=True), mesh)
    check_pointers(cfg, state.model, where)
    rows = random_batch((1, *ROWS[size]), cfg.model.vocab_size, segments=2)
    steps = {
      f"torch {torch.__version__}, {name}": torch_step(cfg, state, abstract, rows, where, compiled)
      for name, compiled in (("eager", False), ("compiled", True))
      if _COMPILED.value or not compiled
    }
    rules, batch = program.training_rules(1), to_global(rows, mesh)
    train_step = program.compile_train_step(state, rules)

    def jax_step() -> float:
      nonlocal state
      state, metrics = train_step(state, batch)
      return float(metrics["train/loss"])

    steps = {f"ats_jax, jax {jax.__version__}": jax_step, **steps}
    first = {name: step() for name, step in steps.items()}
    spread = max(first.values()) - min(first.values())
    print(f"{size}: losses of the first step {first}", flush=True)
    if spread > MAX_ERROR[dtype]:
      raise SystemExit(f"the first losses differ by {spread:.2g} nats: this is not the same step")
    for step in steps.values():  # warm
      step()
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS.value):
      for name, step in steps.items():
        began = time.perf_counter()
        for _ in range(_TURN.value):
          step()  # waits for the loss
        secs = (time.perf_counter() - began) / _TURN.value
        speeds[name].append(ROWS[size][0] * ROWS[size][1] / secs)
  ours = np.array(next(iter(speeds.values())))
  for name, found in speeds.items():
    ratio = np.array(found) / ours
    yield [
      size,
      name,
      f"{statistics.median(found):,.0f}",
      f"{min(found):,.0f} to {max(found):,.0f}",
      f"{np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})",
    ]


def torch_step(cfg, state, abstract, rows, where, compiled: bool) -> Callable[[], float]:
  """The step of `bridge train`, from a state of JAX."""
  dtype = devices.DTYPES[cfg.precision.compute_dtype]
  model = Decoder(cfg, dtype).to(where)
  optimizer = optimizer_of(cfg, model, abstract)
  to_torch(cfg, state, model, optimizer)
  if compiled:
    model.compile()
  trainer, batch, number = Trainer(cfg, model, optimizer, LossScale()), batch_on(where, rows), -1

  def step() -> float:
    nonlocal number
    number += 1
    made = trainer.update(number, batch)
    devices.synchronize(where)
    return float(made.result.sums.cross_entropy / made.totals.counted)

  return step


def check_pointers(cfg: Config, model, where) -> None:
  """PyTorch's weights at the addresses of JAX's."""
  theirs = Decoder(cfg).to(where)
  tensors = shared_tensors(cfg, model)
  weights.put(theirs, tensors, share=True)
  held = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model)}
  wrong = [
    name
    for name, tensor in theirs.state_dict().items()
    if tensor.untyped_storage().data_ptr() not in held
  ]
  if wrong:
    raise SystemExit(f"{len(wrong)} tensors were copied: {wrong[:3]}")
  print(f"{len(tensors)} arrays handed over without a copy, on {devices.kind(where)}", flush=True)


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  found = [row for size in _SIZES.value for row in compare(size)]
  print(markdown(["model", "", "tokens/s", "rounds", "of JAX's"], found))


if __name__ == "__main__":
  app.run(main)
