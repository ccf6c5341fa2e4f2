"""Rows cut along their positions: attention of one device, and what a layer sends."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, compiled_step
from equality import CFG, ROWS, RTOL, mesh_of
from helpers import pack, tiny_config

from ats_jax.ops.attention.along_row import attend_whole_rows
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.ulysses import attend_by_heads
from ats_jax.sharding.mesh import on_mesh

# Key/value heads divide, the one of a device is sent to two, and to four.
OP_CASES = [(4, {"context": 4}), (2, {"context": 2, "tensor": 2}), (1, {"context": 2})]


@functools.cache
def of_attention(kv_heads: int, *sizes: tuple[str, int]) -> list[np.ndarray]:
  """Value and gradients of the op: two rows, windows, a soft cap, sinks, narrow values."""
  rng, (batch, seq, heads, width) = np.random.default_rng(kv_heads), (2, 16, 4, 8)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k = normal(batch, seq, heads, width), normal(batch, seq, kv_heads, width)
  v, sinks, dy = normal(batch, seq, kv_heads, 6), normal(heads), normal(batch, seq, heads, 6)
  segments, _ = pack([[7, 6], [3, 13]], seq)
  how = {"max_segments": 3, "window": 7, "soft_cap": 2.0}

  def loss(q, k, v, sinks):
    along_row = attend_by_heads if sizes else attend_whole_rows
    y = attention(q, k, v, segment_ids_BT=segments, sinks_N=sinks, along_row=along_row, **how)
    return jnp.sum(y * dy), y

  with jax.set_mesh(mesh_of(dict(sizes))):
    grads, y = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
  return [np.asarray(a) for a in (y, *grads)]


@pytest.mark.compat
@pytest.mark.parametrize(("kv_heads", "sizes"), OP_CASES, ids=str)
def test_attention_equals_one_device(kv_heads, sizes):
  one, many = of_attention(kv_heads), of_attention(kv_heads, *sizes.items())
  for got, want in zip(many, one, strict=True):
    np.testing.assert_allclose(got, want, RTOL, 1e-6)
    assert np.abs(want).max() > 0.1


def test_too_few_heads_are_refused_by_the_op():
  q = np.zeros((2, 18, 4, 8), np.float32)
  ids = np.ones((2, 18), np.int32)
  with (
    jax.set_mesh(mesh_of({"context": 3})),
    pytest.raises(ValueError, match=r"over 3 devices, .* divide the 4 heads .* mesh.context"),
  ):
    attention(q, q, q, segment_ids_BT=ids, max_segments=1, along_row=attend_by_heads)


SMALL = 256  # bytes: metrics and norms
WEIGHTS, WIDTH = 7, 32  # matrices of a layer; of an activation


@pytest.mark.mesh
def test_a_layer_swaps_four_arrays_each_way_and_gathers_no_activations():
  """Queries, keys, values and the output; the forward pass swaps again what remat does not keep."""
  changes = {"step.accum_steps": 1, "step.remat": "qkv", "model.num_layers": 3}
  cfg, mesh = tiny_config(CFG | changes), mesh_of({"context": 2})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  every = [c for c in every if c.bytes > SMALL]
  swaps = [c for c in every if c.kind == "all-to-all" and c.in_loop]
  assert len(swaps) == 8 + 1
  # Gradients are summed, of a layer in the loop: nothing of a stack or of tokens.
  # Weights are gathered there, twice; before it the head, ids of segments and of tokens.
  gathered = [(a.size, c.in_loop) for c in every if c.kind == "all-gather" for a in c.arrays]
  assert Counter(in_loop for _, in_loop in gathered) == {0: 3, 1: 2 * WEIGHTS}
  assert max(size for size, _ in gathered) < ROWS * 16 * WIDTH
  kinds = {c.kind for c in every}
  assert kinds == {"all-to-all", "all-gather", "all-reduce", "reduce-scatter"}
  summed = {a.shape for c in every if c.kind == "all-reduce" for a in c.arrays}
  assert not any(ROWS in shape[:1] for shape in summed)
