"""Meshes, small configs and random packed rows that many tests need."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.names import all_settings, conditions
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.numerics import numerics
from ats_jax.ops.implementations import OPS
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.rules import MESH_AXES

# The rules of a pass through dense layers, which have no use for them.
TRAINING = Pass(training=True, capacity=1.0)
EVALUATION = Pass(training=False, capacity=1.0)

TINY = {
  "num_steps": 20,
  "compilation_cache": "off",
  "model.vocab_size": 64,
  "model.num_layers": 2,
  "model.d_model": 32,
  "model.num_heads": 4,
  "model.num_kv_heads": 2,
  "model.d_ff": 64,
  "data.tokenizer": "bytes",
  "data.seq_len": 16,
  "data.batch_size": 8,
  "data.max_segments": 4,
  "optimizer.learning_rate": 1e-2,
  "precision.compute_dtype": "float32",
  "step.loss_chunk_tokens": 48,
}
# Settings of runs in the tests' own process: they find the programs of former runs and sessions.
CACHED = {"compilation_cache": os.environ.get("JAX_COMPILATION_CACHE_DIR", "off")}


def kernels_of(op: str, name: str) -> Kernels:
  """The implementation `name` in each slot of `op` that it can fill."""
  (where,) = [k.where for k in OPS[op].kernels if k.name == name] or [()]
  return Kernels(tuple((f"{op}.{slot}", name) for slot in where))


def make_test_mesh(
  data: int, fsdp: int, tensor: int, expert: int = 1, stage: int = 1, context: int = 1
) -> jax.sharding.Mesh:
  named = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert, "stage": stage}
  named["context"] = context
  sizes = tuple(named[axis] for axis in MESH_AXES)
  return jax.make_mesh(sizes, MESH_AXES, devices=jax.devices()[: math.prod(sizes)])


def tiny_config(changes: dict[str, Any] | None = None) -> Config:
  """A resolved config of a two-layer model, with some settings (by dotted name) changed."""
  config, changes = base_config(), changes or {}
  config.update_from_flattened_dict(TINY | changes)
  cfg = from_config_dict(config)
  return resolve(cfg, cfg.model.vocab_size)


# Of some conditions a value that holds, which goes with the other ones of a setting.
HOLDS = {
  "moe.num_experts": 8,
  "moe.num_groups": 2,
  "log.writers": ("wandb",),
  "data.sources": Table(a=("a.txt",)),
  "data.phases": (Phase(Table(a=1.0), steps=3), Phase(Table(a=1.0))),
}


def enabling(name: str) -> dict[str, Any]:
  """Settings with which the setting `name` has an effect, as far as its conditions say."""
  every, found = conditions(name, all_settings()[name][0].field), {}
  for needs in every:
    if needs.setting == name:
      continue
    other = all_settings()[needs.setting][0].field
    usual = {bool: True, int: 2, float: 0.5, str: "x"}.get(other.type)
    values = (other.default, *other.metadata["choices"], HOLDS.get(needs.setting, usual))
    of_it = [one for one in every if one.setting == needs.setting]
    value = next(v for v in values if all(one.holds(v) for one in of_it))
    found |= enabling(needs.setting) | ({} if value == other.default else {needs.setting: value})
  return found


def make_decoder(cfg: Config, seed: int = 0) -> Decoder:
  """The decoder of `cfg` on the current mesh."""
  # Op by op: the program of a shape serves all models, and one of the whole costs a second.
  return Decoder(cfg, numerics(cfg), nnx.Rngs(params=jax.random.key(seed)))


def thorough_but(cases: Sequence[Any], *quick: int) -> list[Any]:
  """The cases of a parametrised test, of which `make test` runs those at `quick` alone."""
  marks = lambda i: () if i in quick else pytest.mark.thorough
  return [pytest.param(case, marks=marks(i)) for i, case in enumerate(cases)]


def pack(lengths: list[list[int]], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  """Segment ids (1.., then 0 for padding) and positions of rows of documents of these lengths."""
  segments = np.zeros((len(lengths), seq_len), np.int32)
  positions = np.zeros_like(segments)
  for row, row_lengths in enumerate(lengths):
    at = 0
    for number, length in enumerate(row_lengths, 1):
      segments[row, at : at + length] = number
      positions[row, at : at + length] = np.arange(length)
      at += length
  return segments, positions


def random_rows(cfg: Config, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
  """Packed rows [rows, seq]: ragged documents, padding at the end of some, holes in the mask."""
  rng, seq = np.random.default_rng(seed), cfg.data.seq_len
  lengths = []
  for _ in range(rows):
    used = int(rng.integers(seq // 2, seq + 1))
    cuts = rng.choice(np.arange(1, used), size=rng.integers(0, 3), replace=False)
    lengths.append(np.diff([0, *sorted(cuts), used]).tolist())
  segments, positions = pack(lengths, seq)
  tokens = rng.integers(0, cfg.model.vocab_size, (2, rows, seq)).astype(np.int32)
  mask = (segments > 0) & (rng.random((rows, seq)) < 0.8)
  return {
    "tokens": tokens[0],
    "targets": tokens[1],
    "loss_mask": mask.astype(np.float32),
    "segment_ids": segments,
    "positions": positions,
  }


def counting_rows(seed: int, *, noise: bool = False) -> dict[str, np.ndarray]:
  """Eight rows of 16 tokens that count, but for a fifth of the tokens; or noise."""
  rng = np.random.default_rng(seed)
  counting = (rng.integers(0, 64, (8, 1)) + np.arange(17)) % 64
  wrong = noise | (rng.random((8, 17)) < 0.2)
  tokens = np.where(wrong, rng.integers(0, 64, (8, 17)), counting).astype(np.int32)
  ones = np.ones((8, 16), np.int32)
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "loss_mask": ones.astype(np.float32),
    "segment_ids": ones,
    "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
  }


def micro_batches(rows: dict[str, np.ndarray], accum: int) -> dict[str, np.ndarray]:
  """[rows, seq] -> [accum, rows / accum, seq]."""
  return {k: v.reshape(accum, -1, *v.shape[1:]) for k, v in rows.items()}


def named_leaves(tree: Any) -> dict[str, Any]:
  """The arrays of a tree by path."""
  return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def with_flipped_bit(tree: Any, name: str, device: Any, layer: int = 0) -> Any:
  """`tree` in which one device's copy of a tensor differs from the others in one bit."""

  def flip(path, x):
    if name not in jax.tree_util.keystr(path):
      return x
    shards = []
    for shard in x.addressable_shards:
      value = np.array(shard.data)
      if shard.device == device:
        value.reshape(len(value), -1)[layer].view(np.uint32)[0] ^= 1
      shards.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

  return jax.tree_util.tree_map_with_path(flip, tree)


def assert_trees_equal(got: Any, want: Any) -> None:
  """Compare all arrays of two trees, bit for bit but for NaN."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_trees_close(got: Any, want: Any, *, rtol: float, atol: float) -> None:
  got, want = named_leaves(got), named_leaves(want)
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(
      np.asarray(got[name], np.float64), np.asarray(value, np.float64), rtol, atol, err_msg=name
    )


def sizes(jaxpr: Any) -> Iterator[int]:
  """The size of every intermediate of a jaxpr and of all jaxprs inside its equations."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
    for param in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=_is_jaxpr):
      if _is_jaxpr(param):
        yield from sizes(getattr(param, "jaxpr", param))


def _is_jaxpr(x: Any) -> bool:
  return hasattr(x, "eqns") or hasattr(x, "jaxpr")
