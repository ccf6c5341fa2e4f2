"""Rows whose keys and values go round a ring: attention of one device, and what is sent."""

import functools

import cudnn_stand_in
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import Collective, collectives, compiled_step
from equality import ROWS, RTOL, config_of, mesh_of
from helpers import kernels_of, pack

from ats_jax.ops.attention.along_row import WHOLE_ROWS
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.ring import (
  FIRST,
  SECOND,
  Ring,
  chunk_owner,
  from_zigzag,
  pair_of_chunks,
  to_zigzag,
  token_positions_at,
)
from ats_jax.sharding.apply import axis_index, island
from ats_jax.sharding.mesh import on_mesh

SEQ, HEADS, NARROW = 48, 4, 6
SEGMENTS = pack([[21, 18], [5, 29, 9]], SEQ)[0]


def gradients(**how):
  """The value and the gradients of the op, as a program."""

  def loss(q, k, v, sinks, dy):
    y = attention(q, k, v, segment_ids_BT=SEGMENTS, max_segments=4, sinks_N=sinks, **how)
    return jnp.sum(y * dy), y

  return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))


@functools.cache
def arrays(kv_heads: int) -> tuple[np.ndarray, ...]:
  rng = np.random.default_rng(kv_heads)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = normal(2, SEQ, HEADS, 8), normal(2, SEQ, kv_heads, 8), normal(2, SEQ, kv_heads, NARROW)
  return q, k, v, normal(HEADS), normal(2, SEQ, HEADS, NARROW)


def of_attention(kv_heads, sizes, **how):
  along_row = Ring() if "context" in sizes else WHOLE_ROWS
  with jax.set_mesh(mesh_of(sizes)):
    grads, y = gradients(along_row=along_row, **how)(*arrays(kv_heads))
  return [np.asarray(a) for a in (y, *grads)]


@pytest.mark.compat
@pytest.mark.parametrize(
  ("sizes", "kv_heads", "how", "kernel"),
  [
    ({"context": 4, "tensor": 2}, 2, {"window": 17, "soft_cap": 2.0}, "xla"),
    pytest.param({"context": 3}, 1, {}, "cudnn", marks=pytest.mark.mesh),
  ],
  ids=str,
)
def test_attention_equals_one_device(monkeypatch, sizes, kv_heads, how, kernel):
  cudnn_stand_in.install(monkeypatch)
  one = of_attention(kv_heads, {}, **how)
  many = of_attention(kv_heads, sizes, kernels=kernels_of("attention_block", kernel), **how)
  for got, want in zip(many, one, strict=True):
    np.testing.assert_allclose(got, want, RTOL, 2e-6)
    assert np.abs(want).max() > 0.1


def test_what_a_ring_cannot_do_is_an_error():
  q = np.zeros((2, 18, 4, 8), np.float32)
  ids = np.ones((2, 18), np.int32)
  run = functools.partial(attention, segment_ids_BT=ids, max_segments=1, along_row=Ring())
  with (
    jax.set_mesh(mesh_of({"context": 2})),
    pytest.raises(ValueError, match=r"has 9 of 18 .* multiple of 4, or mesh.context_ring=false"),
  ):
    run(q, q, q)
  with (
    jax.set_mesh(mesh_of({"context": 3})),
    pytest.raises(ValueError, match=r"cudnn has neither a window \(3\).*=attention_block=xla"),
  ):
    run(q, q, q, window=3, kernels=kernels_of("attention_block", "cudnn"))


@hypothesis.given(st.integers(1, 64))
def test_even_and_odd_chunks_are_one_permutation_each(ways):
  owners = [chunk_owner(chunk, ways) for chunk in range(2 * ways)]
  for parity in (0, 1):
    assert sorted(owners[parity::2]) == list(range(ways))
  for device in range(ways):
    assert [c for c, of in enumerate(owners) if of == device] == [device, 2 * ways - 1 - device]


@pytest.mark.parametrize("ways", [3, 8])
def test_chunks_go_to_their_devices_and_back(ways):
  """And what each device computes there: as many pairs of tokens in each step as the others."""
  axes, chunk = ("batch", "seq"), 2
  row = np.arange(2 * ways * chunk, dtype=np.int32)[None]
  ids = np.ones_like(row)

  def local(row, ids):
    there, sizes = to_zigzag(row), []
    here = token_positions_at(ids, 0)
    for step in range(ways):
      queries, keys, is_earlier = here, token_positions_at(ids, step), axis_index("seq") >= step
      if step:
        queries = pair_of_chunks(queries, SECOND, is_earlier)
        keys = pair_of_chunks(keys, FIRST, is_earlier)
      distance = queries.at_BT[:, :, None] - keys.at_BT[:, None]
      sizes.append(jnp.sum(distance >= 0))
    return there, here.at_BT, from_zigzag(there), jnp.stack(sizes)[None]

  with jax.set_mesh(mesh_of({"context": ways})):
    run = jax.jit(island(local, in_axes=(axes, ("batch", None)), out_axes=(axes,) * 4))
    there, at, back, sizes = map(np.asarray, run(row, ids))
  chunks = row.reshape(-1, chunk)
  want = [chunks[c] for device in range(ways) for c in (device, 2 * ways - 1 - device)]
  np.testing.assert_array_equal(there, np.concatenate(want)[None])
  np.testing.assert_array_equal(at, there)
  np.testing.assert_array_equal(back, row)
  own, with_others = chunk * (2 * chunk + 1), 2 * chunk**2  # all that is computed is seen
  assert sizes.reshape(ways, ways).tolist() == [[own] + [with_others] * (ways - 1)] * ways


def permutes(every: list[Collective]) -> int:
  return sum(c.kind == "collective-permute" for c in every)


@pytest.mark.mesh
def test_keys_and_values_go_round_once_a_pass():
  """Of n = 4 devices; to the owners of chunks and back it takes two permutations an array."""
  q, k, v, _, dy = arrays(2)
  with jax.set_mesh(mesh_of({"context": 4})):
    text = gradients(along_row=Ring()).lower(q, k, v, None, dy).compile().as_text()
  every = collectives(text)
  forward, backward = 4 * 2 + 3, 4 * 2 + 3 + 4  # gradients go home too
  assert permutes(every) == len(every) == forward + backward


@pytest.mark.mesh
def test_a_layer_gathers_no_activations():
  """What `names` keeps spares the ring, but not the way of chunks to their devices and back.

  Of two devices: one of two permutations of chunks leaves all where they are. Four arrays are moved
  in each pass, and four again. Keys and values are sent on once a pass, their gradients twice, and
  both together.
  """
  sizes = {"context": 2, "context_ring": True}
  cfg = config_of("latent", sizes, {"step.accum_steps": 1, "step.remat": "names"})
  mesh = mesh_of(sizes)
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  in_layers = [c for c in every if c.kind == "collective-permute"]
  assert all(c.in_loop for c in in_layers)
  chunk, whole = (ROWS, 4, 4, 8), (ROWS, 8, 4, 2 * 8)
  count = lambda shape: sum(a.shape == shape for c in in_layers for a in c.arrays)
  assert (count(chunk), count(whole)) == (12, 4)
  # Of what has rows, segment ids, once for all layers. The others are weights.
  gathered = [(a.shape, c.in_loop) for c in every if c.kind == "all-gather" for a in c.arrays]
  assert [g for g in gathered if g[0][0] == ROWS] == [((ROWS, 16), 0)]
  assert not any(c.in_loop for c in every if c.kind in ("all-to-all", "reduce-scatter"))
