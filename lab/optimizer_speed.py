r"""How long the updates of optimizers take, and what they need: of the layers of Llama 3.1 8B.

Gradients are random and the same for all updates; there is neither a forward nor a backward pass.
Prints a row for each optimizer: milliseconds of an update (median of several runs of some updates
in a row), gigabytes of its state on a device, bytes of it for each parameter, and gigabytes of
temporary arrays, which are those that XLA did not fuse.
Command: python -m lab.optimizer_speed [--names=adamw,adamw8bit] [--layers=4] [--width=4096] \
  [--vocab=128256] [--param_dtype=bfloat16] [--updates=10] [--devices=2] \
  [--set=optimizer.mu_dtype=bfloat16]
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.text import parse
from ats_jax.config.tree import edited
from ats_jax.model.param import trainable
from ats_jax.planner.abstract import device_bytes, resolve_without_data
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.program import make_program
from lab.runs import llama_8b, named_values

RUNS = 5  # of which the median counts
GB = 1e9

_NAMES = flags.DEFINE_list("names", ["adamw", "adamw8bit"], "Of optimizers (optimizer.name).")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers; the model has 32.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 4096, "model.d_model; a multiple of 128.", lower_bound=128)
_VOCAB = flags.DEFINE_integer("vocab", 128_256, "Tokens of the vocabulary.", lower_bound=1)
_DTYPE = flags.DEFINE_string("param_dtype", "float32", "Of parameters and gradients.")
_DEVICES = flags.DEFINE_integer("devices", 1, "That share the layers (mesh.fsdp).", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 10, "Updates in a row, of a run.", lower_bound=1)
_SET = flags.DEFINE_multi_string("set", [], "NAME=VALUE,... of all optimizers.")


class Row(NamedTuple):
  """What was measured of an optimizer; see the module."""

  name: str
  ms: float
  state_gb: float
  bytes_per_parameter: float
  temporary_gb: float


def config_of(name: str) -> Config:
  """A model of the shape of Llama 3.1 8B, but for what flags say."""
  config = base_config()
  config.update(
    {
      "model": llama_8b(_LAYERS.value, _WIDTH.value, _VOCAB.value),
      "optimizer": {"name": name},
      "data": {"tokenizer": "bytes"},
      "precision": {"param_dtype": _DTYPE.value},
      "mesh": {"fsdp": _DEVICES.value},
    }
  )
  changes = named_values(_SET.value)
  if name == "schedule_free":
    changes["optimizer.schedule"] = "constant"
  values = edited(config.to_dict())
  for setting, text in changes.items():
    values.assign({setting: parse(setting, text, values.to_dict())})
  return resolve_without_data(from_config_dict(values))


def measure(name: str) -> Row:
  """Time updates of all parameters by one optimizer."""
  cfg = config_of(name)
  with on_mesh(cfg, make_mesh(cfg, jax.devices()[: _DEVICES.value])):
    program = make_program(cfg)
    optimizer = program.optimizer
    params: Any = trainable(program.init(abstract=True).model)
    leaves, structure = jax.tree.flatten(params)

    @functools.partial(jax.jit, static_argnums=0)
    def arrays(seed: int) -> Any:
      keys = [jax.random.fold_in(jax.random.key(seed), i) for i in range(len(leaves))]
      normal = lambda key, x: jax.random.normal(key, x.shape, out_sharding=x.sharding)
      draw = lambda key, x: (0.01 * normal(key, x)).astype(x.dtype)
      return structure.unflatten(map(draw, keys, leaves))

    weights, grads = arrays(0), arrays(1)
    state, lr = jax.jit(optimizer.tx.init)(weights), jnp.float32(1e-4)
    update = jax.jit(optimizer.update, donate_argnums=(0, 2))
    compiled = update.lower(weights, grads, state, lr).compile()
    needs = compiled.memory_analysis()
    number, kept = sum(x.size for x in jax.tree.leaves(weights)), device_bytes(state)
    ms = 1e3 * _secs_of(compiled, weights, grads, state, lr)
    temporary = needs.temp_size_in_bytes if needs else float("nan")
  return Row(name, ms, kept / GB, kept / number, temporary / GB)


def _secs_of(update: Callable, weights: Any, grads: Any, state: Any, lr: jax.Array) -> float:
  times = []
  for run in range(1 + RUNS):  # the first one warms up
    jax.block_until_ready((weights, state))
    began = time.perf_counter()
    for _ in range(_UPDATES.value if run else 1):
      weights, state, _ = update(weights, grads, state, lr)
    jax.block_until_ready((weights, state))
    times.append((time.perf_counter() - began) / _UPDATES.value)
  return statistics.median(times[1:])


def main(argv: list[str]) -> None:
  """Print a table."""
  del argv
  device = jax.devices()[0].device_kind
  where = f"{_DEVICES.value} x {device}"
  print(f"{_LAYERS.value} layers of width {_WIDTH.value}, {_DTYPE.value}, on {where}")
  print(f"{'optimizer':<16} {'ms':>9} {'state GB':>9} {'bytes/par':>9} {'temp GB':>9}")
  for name in _NAMES.value:
    row = measure(name)
    print(f"{row.name:<16}", *(f"{value:9.3f}" for value in row[1:]))
    sys.stdout.flush()


if __name__ == "__main__":
  app.run(main)
