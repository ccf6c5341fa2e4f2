r"""How long a step of LoRA takes beside weights in each format, and what it needs.

Weights and tokens are random; the model has the shape of Llama 3.1 8B but for what flags say.
Prints a row for each format: milliseconds of a step (median), tokens a second, the share of the
speed beside plain weights, gigabytes of the state, and of temporary arrays.
Command: python -m lab.qlora_speed [--bases=plain,int8,int4,nf4] [--layers=8] \
  [--width=4096] [--rows=2] [--seq=4096] [--steps=10] [--set=step.remat=names]
"""

import statistics
import sys
import time
from typing import NamedTuple

import jax
from absl import app, flags

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.text import parse
from ats_jax.config.tree import edited
from ats_jax.data.batch import random_batch
from ats_jax.planner.abstract import device_bytes, resolve_without_data
from ats_jax.sharding.mesh import make_mesh, on_mesh, to_global
from ats_jax.step.program import make_program
from lab.runs import llama_8b, named_values

GB = 1e9

_BASES = flags.DEFINE_list("bases", ["plain", "int8", "int4", "nf4"], "Formats.")
_LAYERS = flags.DEFINE_integer("layers", 8, "Layers; the model has 32.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 4096, "model.d_model; a multiple of 128.", lower_bound=128)
_ROWS = flags.DEFINE_integer("rows", 2, "Rows of a step.", lower_bound=1)
_SEQ = flags.DEFINE_integer("seq", 4096, "Tokens of a row.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 10, "Steps that are timed.", lower_bound=1)
_SET = flags.DEFINE_multi_string("set", [], "NAME=VALUE,... of all of them.")


class Row(NamedTuple):
  """What was measured of a format; see the module."""

  ms: float
  tokens_a_second: float
  state_gb: float
  temporary_gb: float


def config_of(base: str) -> Config:
  """The run, with its base in a format."""
  config = base_config()
  config.update(
    {
      "model": llama_8b(_LAYERS.value, _WIDTH.value, 128_256),
      "data": {"tokenizer": "bytes", "batch_size": _ROWS.value, "seq_len": _SEQ.value},
      "precision": {"param_dtype": "bfloat16"},
    }
  )
  values = edited(config.to_dict())
  changes = {"finetune.adapter": "lora", "finetune.adapter.base": base}
  for setting, text in (changes | named_values(_SET.value)).items():
    values.assign({setting: parse(setting, text, values.to_dict())})
  return resolve_without_data(from_config_dict(values))


def measure(base: str) -> Row:
  """Time steps beside weights in a format."""
  cfg = config_of(base)
  mesh = make_mesh(cfg)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state, accum = program.init(), cfg.step.accum_steps
    shape = (accum, cfg.data.batch_size // accum, cfg.data.seq_len)
    batch = to_global(random_batch(shape, cfg.model.vocab_size), mesh)
    size, rules = device_bytes(state), program.training_rules(1)
    step = program.train_step.lower(state, batch, rules).compile()
    needs, times = step.memory_analysis(), []
    for _ in range(2 + _STEPS.value):
      began = time.perf_counter()
      state, metrics = step(state, batch)
      jax.block_until_ready((state, metrics))
      times.append(time.perf_counter() - began)
  secs = statistics.median(times[2:])
  temporary = needs.temp_size_in_bytes if needs else float("nan")
  return Row(1e3 * secs, _ROWS.value * _SEQ.value / secs, size / GB, temporary / GB)


def main(argv: list[str]) -> None:
  """Print a table."""
  del argv
  print(f"{_LAYERS.value} layers of width {_WIDTH.value}, on {jax.devices()[0].device_kind}")
  print(f"{'base':<10} {'ms':>9} {'tok/s':>9} {'of first':>9} {'state GB':>9} {'temp GB':>9}")
  first = 0.0
  for name in _BASES.value:
    jax.clear_caches()
    row = measure(name)
    first = first or row.tokens_a_second
    columns = row.ms, row.tokens_a_second, row.tokens_a_second / first, *row[2:]
    print(f"{name:<10}", *(f"{value:9.3f}" for value in columns))
    sys.stdout.flush()


if __name__ == "__main__":
  app.run(main)
