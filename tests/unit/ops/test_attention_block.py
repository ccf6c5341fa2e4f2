"""Attention in parts that are joined by log-sum-exp, in XLA and around cuDNN."""

import functools
from unittest import mock

import cudnn_stand_in
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, pack, tiny_config

from ats_jax.ops import _compat
from ats_jax.ops.attention import block, cudnn
from ats_jax.ops.attention.block import MaskRules, TokenPositions, merge_attention
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.cudnn import by_segment, by_token, segment_bounds, shared_bounds
from ats_jax.ops.registry import choose_op
from ats_jax.ops.requirements import Device

pytestmark = pytest.mark.compat

RTOL, ATOL = 1e-5, 1e-6
CHUNK, CHUNKS = 6, 4
SEQ = CHUNK * CHUNKS
# Two rows: documents within chunks, over several of them, and padding.
LENGTHS = [[2, 3, 1, 9, 9], [17, 3]]
SEGMENTS = pack(LENGTHS, SEQ)[0]
MAX_SEGMENTS = 6


def tokens(part: slice | np.ndarray) -> TokenPositions:
  at = np.broadcast_to(np.arange(SEQ, dtype=np.int32), SEGMENTS.shape)
  return TokenPositions(SEGMENTS[:, part], at[:, part])


@functools.cache
def arrays(v_width: int = 6) -> list[np.ndarray]:
  rng = np.random.default_rng(0)
  shapes = [(2, SEQ, 4, 8), (2, SEQ, 2, 8), (2, SEQ, 2, v_width), (2, SEQ, 4, v_width)]
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


ALL = slice(None)


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.lists(st.integers(0, 3), min_size=SEQ, max_size=SEQ))
def test_any_parts_of_the_keys_give_what_all_of_them_do(part_of_key):
  """Also where a query sees nothing of a part, and where a part has no key."""
  (q, k, v, dy), (window, soft_cap) = arrays(), (5, 0.7)
  rules, here = MaskRules(True, MAX_SEGMENTS, window, soft_cap), tokens(ALL)
  want, gradients = of_whole_rows(window, soft_cap)
  # A key of another part is in no segment: one shape for all examples.
  parts = [
    here._replace(ids_BT=np.where(np.array(part_of_key) == part, here.ids_BT, -1))
    for part in range(4)
  ]
  y, lse = merge(*(run_forward(q, k, v, here, keys, rules) for keys in parts))
  np.testing.assert_allclose(y, want, RTOL, ATOL)
  shares = [run_backward(q, k, v, here, keys, y, lse, dy, rules) for keys in parts]
  for found, one in zip(map(sum, zip(*shares, strict=True)), gradients, strict=True):
    np.testing.assert_allclose(found, one, RTOL, ATOL)


@functools.cache
def of_whole_rows(window: int | None, soft_cap: float | None) -> tuple:
  *args, dy = arrays()
  how = {"window": window, "soft_cap": soft_cap, "max_segments": MAX_SEGMENTS}

  def loss(q, k, v):
    y = attention(q, k, v, segment_ids_BT=SEGMENTS, **how)
    return jnp.sum(y * dy), y

  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    gradients, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*args)
  return np.asarray(y), [np.asarray(a) for a in gradients]


merge = jax.jit(merge_attention)
run_forward = jax.jit(block.forward, static_argnums=5)
run_backward = jax.jit(block.backward, static_argnums=8)


def test_nothing_merged_with_nothing_is_nothing():
  nothing = jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf)
  y, lse = merge(nothing, nothing)
  assert not y.any() and jnp.isneginf(lse).all()


PAIRS = [(a, b) for a in range(CHUNKS) for b in range(a)]


def test_cudnn_is_asked_for_the_segment_that_two_chunks_share(monkeypatch):
  """For all pairs of chunks, and for tokens with themselves; what it leaves unwritten is not read.

  These may be of two places, as those of a device in a ring: segments stay runs, tokens in order.
  """
  cudnn_stand_in.install(monkeypatch)
  q, k, v, dy = arrays()
  whole = MaskRules(True, MAX_SEGMENTS)
  y, lse = run_forward(q, k, v, tokens(ALL), tokens(ALL), whole)
  chunk = [np.arange(i * CHUNK, (i + 1) * CHUNK) for i in range(CHUNKS)]
  both = np.concatenate([chunk[0], chunk[-1]])
  blocks = jax.jit(
    lambda kind, rules, *a: (kind.block_forward(*a[:5], rules), kind.block_backward(*a, rules)),
    static_argnums=(0, 1),
  )
  for of_q, of_k in [*((chunk[a], chunk[b]) for a, b in PAIRS), (both, both)]:
    rules = whole._replace(is_diagonal=of_q is of_k)
    args = (q[:, of_q], k[:, of_k], v[:, of_k], tokens(of_q), tokens(of_k))
    args += y[:, of_q], lse[:, of_q], dy[:, of_q]
    found, want = (blocks(kind, rules, *args) for kind in (cudnn, Reference))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(one, other, RTOL, ATOL, err_msg=f"{of_q} {of_k}")


class Reference:
  block_forward = staticmethod(block.forward)
  block_backward = staticmethod(block.backward)


def test_the_segment_that_began_before():
  queries = jnp.array([[3, 3, 4, 4], [5, 5, 5, 5], [2, 0, 0, 0]])
  keys = jnp.array([[1, 2, 3, 3], [5, 5, 5, 5], [1, 1, 1, 1]])
  (q_starts, q_lengths), (k_starts, k_lengths) = jax.jit(shared_bounds)(queries, keys)
  assert q_starts.tolist() == [[0, -1, -1], [0, -1, -1], [-1, -1, -1]]
  assert k_starts.tolist() == [[2, -1, -1], [0, -1, -1], [-1, -1, -1]]
  assert q_lengths.tolist() == [[2, -1], [4, -1], [-1, -1]]
  assert k_lengths.tolist() == [[2, -1], [4, -1], [-1, -1]]


@jax.jit
def there_and_back(values, ids):
  starts, _ = segment_bounds(ids, 6)
  return by_token(by_segment(values, starts), starts)


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.lists(st.integers(1, SEQ // 2), min_size=1, max_size=5))
def test_statistics_by_token_and_by_segment(lengths):
  ids = pack([lengths[: np.searchsorted(np.cumsum(lengths), SEQ)], [7, 9, 8]], SEQ)[0]
  values = np.random.default_rng(0).normal(size=(2, SEQ, 3)).astype(np.float32)
  np.testing.assert_array_equal(there_and_back(values, ids), values)


def test_the_private_functions_take_queries_and_keys_of_different_segments():
  q, k, v, _ = (jnp.asarray(a, jnp.bfloat16) for a in arrays(8))
  of_q, of_k = shared_bounds(jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS[:, :CHUNK]))
  k, v = k[:, :CHUNK], v[:, :CHUNK]
  with mock.patch.object(_compat.cudnn, "dot_product_attention") as private:
    private.return_value = q, jnp.zeros((4, 4, SEQ))
    _compat.cudnn_attention_forward(q, k, v, *of_q, 0.5, key_bounds=of_k)
  given = private.call_args.kwargs
  assert given["mask_type"] == _compat.cudnn.MaskType.PADDING
  assert given["q_offsets"] is of_q[0] and given["kv_offsets"] is of_k[0]
  assert given["q_seqlen"] is of_q[1] and given["kv_seqlen"] is of_k[1]
  backward = functools.partial(_compat.cudnn_attention_backward, scale=0.5, key_bounds=of_k)
  args = q, k, v, *of_q, q, jnp.zeros((4, 4, SEQ)), q
  assert [g.shape for g in jax.eval_shape(backward, *args)] == [q.shape, k.shape, v.shape]
  text = jax.jit(backward).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
  assert "__cudnn$fmhaSoftmaxBackward" in text
  assert "PADDING" in text and "PADDING_CAUSAL" not in text


HOPPER = Device("gpu", "9.0")
OF_RING = {"mesh.context": 2, "mesh.context_ring": True}


def test_cudnn_runs_in_a_ring_without_windows():
  cfg = {"precision.compute_dtype": "bfloat16", "model.head_dim": 64, **OF_RING}
  choose = lambda cfg: choose_op(tiny_config(cfg), HOPPER, "attention_block")
  assert {choice.implementation for choice in choose(cfg).values()} == {"cudnn"}
  windowed = choose(cfg | {"model.window": 4})["forward"]
  assert windowed.implementation == "xla"
  assert "no windows in a ring, model.window is 4" in windowed.reason
