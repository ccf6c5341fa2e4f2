r"""Speed of a training step against the same step in PyTorch, eager and compiled, in one run.

All are in one process on one device, start from the same state and see the same batches; they take
turns, a few steps each, and their first losses must agree. Before that PyTorch is given JAX's
weights without a copy, and the addresses are compared. Prints a table for
docs/reference/performance.md: tokens a second (median of the rounds, lowest and highest), the ratio
to JAX in each round, and what ran in JAX and in PyTorch. Each entry of --kernels takes the memory
of one more model, twice with --compiled.
Command: pip install torch triton
  python -m lab.torch_speed [--sizes=350m,moe,mod,hybrid] [--kernels=triton,xla] [--rounds=4]
  python -m lab.torch_speed --sizes=toy,toy_moe,toy_mod,toy_hybrid --device=cpu
"""

import dataclasses
import math
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
from ats_jax.config.schema import OpsConfig
from ats_jax.config.schema.setting import Table
from ats_jax.data.batch import random_batch
from ats_jax.pytorch import weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.kernels import TRITON_OPS, chosen_kernels
from ats_jax.pytorch.training import device as devices
from ats_jax.pytorch.training.device import LossScale
from ats_jax.pytorch.training.state import optimizer_of, shared_tensors, to_torch
from ats_jax.pytorch.training.step import Trainer, batch_on
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.program import make_program
from lab.runs import markdown

GQA = dict(num_heads=16, num_kv_heads=4)
TOY = dict(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=512)
LAYERS_24 = dict(num_layers=24, d_model=1024, **GQA, d_ff=2816, vocab_size=32768)
LAYERS_12 = LAYERS_24 | dict(num_layers=12)
EXPERTS = dict(num_experts=16, top_k=2, d_ff=1408)
TOY_EXPERTS = dict(num_experts=4, top_k=2, d_ff=64)
SKIPPING = dict(routing="learned", capacity=0.5)
SIZES = {
  "350m": dict(model=LAYERS_24),
  "moe": dict(model=LAYERS_12, moe=EXPERTS),
  "mod": dict(model=LAYERS_24, mod=SKIPPING),
  "hybrid": dict(model=LAYERS_12, moe=EXPERTS, mod=SKIPPING),
  "toy": dict(model=TOY),
  "toy_moe": dict(model=TOY, moe=TOY_EXPERTS),
  "toy_mod": dict(model=TOY, mod=SKIPPING),
  "toy_hybrid": dict(model=TOY, moe=TOY_EXPERTS, mod=SKIPPING),
}
OWN = "xla"  # in `ops.kernels`: PyTorch's own operations
MAX_ERROR = {"float32": 1e-3, "bfloat16": 3e-2}  # nats, of the first loss
_SIZES = flags.DEFINE_list("sizes", ["350m", "moe"], f"Which models: {', '.join(SIZES)}.")
_KERNELS = flags.DEFINE_list(
  "kernels",
  [],
  "What PyTorch's steps run, one after the other: triton, or xla for its own operations. Default: "
  "triton on cuda, xla on a CPU. JAX runs its defaults.",
)
_DEVICE = flags.DEFINE_string("device", "cuda", "cuda, or cpu to try it.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns that each takes.", lower_bound=1)
_TURN = flags.DEFINE_integer("turn_steps", 5, "Steps of a turn.", lower_bound=1)
_COMPILED = flags.DEFINE_bool("compiled", True, "Also by torch.compile.")


def rows_of(size: str) -> tuple[int, int]:
  """Rows of a batch, and tokens of each."""
  if size.startswith("toy"):
    return 4, 64
  return (8 if "moe" in SIZES[size] else 16), 2048


def make_config(size: str, dtype: str) -> Config:
  """The run, with a constant learning rate."""
  config = base_config()
  for section, values in SIZES[size].items():
    config[section].update(values)
  if "moe" in SIZES[size]:  # unrolled, JAX's step was not compiled after 105 s on an H100
    config.step.scan_unroll = 1
    config.step.compiler_options = {"xla_gpu_enable_triton_gemm": "false"}
  config.data.batch_size, config.data.seq_len = rows_of(size)
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
    rows = random_batch((1, *rows_of(size)), cfg.model.vocab_size, segments=2)
    steps = {}
    for kernels in _KERNELS.value or ["triton" if where.type == "cuda" else OWN]:
      with_kernels = dataclasses.replace(cfg, ops=OpsConfig(kernels=of_ops(cfg, kernels)))
      chosen = chosen_kernels(with_kernels, where, devices.DTYPES[dtype])
      runs = ", ".join(f"{op} {name}" for op, name in chosen.items()) or "its own operations"
      for way in ("eager", "compiled") if _COMPILED.value else ("eager",):
        step = torch_step(with_kernels, state, abstract, rows, where, way == "compiled")
        steps[f"torch {torch.__version__}, {way}: {runs}"] = step
    rules, batch = program.training_rules(1), to_global(rows, mesh)
    train_step = program.compile_train_step(state, rules)

    def jax_step() -> float:
      nonlocal state
      state, metrics = train_step(state, batch)
      return float(metrics["train/loss"])

    of_triton = [c for c in program.choices if c.op.split(".")[0] in TRITON_OPS]
    ran = ", ".join(f"{c.op} {c.implementation}" for c in of_triton)
    steps = {f"ats_jax, jax {jax.__version__}: {ran}": jax_step, **steps}
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
        speeds[name].append(math.prod(rows_of(size)) / secs)
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


def of_ops(cfg: Config, name: str) -> Table[str]:
  """One implementation for all ops of a model for which PyTorch has a choice."""
  ops = TRITON_OPS if cfg.moe.num_experts else TRITON_OPS[:1]
  return Table(dict.fromkeys(ops, name))


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
