"""The parts of a ring by cuDNN on packed rows, against the XLA reference in float32.

The parts need one GPU; the ring itself two or more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kernels_of, make_test_mesh

from ats_jax.ops.attention import block, cudnn
from ats_jax.ops.attention.along_row import WHOLE_ROWS
from ats_jax.ops.attention.block import MaskRules, TokenPositions
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.ring import Ring

pytestmark = pytest.mark.gpu

# Relative Frobenius error of bfloat16 operands against float32, as in test_attention_gpu.py.
TOLERANCE = 5e-3
BATCH, SEQ, CHUNK, MAX_SEGMENTS = 3, 1280, 320, 9
CUTS = {
  "one document": ([], [], []),
  "none is shared": ([CHUNK, 2 * CHUNK, 3 * CHUNK],) * 3,
  "some rows share one": ([300, 700], [CHUNK, 2 * CHUNK, 3 * CHUNK], [319, 321, 639, 641, 961]),
  "padding": ([700], [1], [SEQ - 1]),
}


def segment_ids(kind: str) -> np.ndarray:
  ids = np.ones((BATCH, SEQ), np.int32)
  for row, cuts in enumerate(CUTS[kind]):
    for cut in cuts:
      ids[row, cut:] += 1
    if kind == "padding":
      ids[row, cuts[-1] :] = 0
  return ids


@functools.cache
def arrays(heads: int, kv_heads: int, width: int, v_width: int) -> tuple[jax.Array, ...]:
  rng = np.random.default_rng(0)
  draw = lambda n, h: jnp.asarray(rng.standard_normal((BATCH, SEQ, n, h)), jnp.bfloat16)
  q, k, v = draw(heads, width), draw(kv_heads, width), draw(kv_heads, v_width)
  return q, k, v, draw(heads, v_width)


@functools.partial(jax.jit, static_argnums=(0, 1))
def blocks(kind, rules, q, k, v, of_q, of_k, y, lse, dy):
  """A block's own output and statistics, and its share in the gradients."""
  found = kind.block_forward(q, k, v, of_q, of_k, rules)
  return *found, *kind.block_backward(q, k, v, of_q, of_k, y, lse, dy, rules)


class Reference:
  block_forward = staticmethod(block.forward)
  block_backward = staticmethod(block.backward)


whole = jax.jit(block.forward, static_argnums=5)
SHAPES = [(8, 8, 64, 64), (8, 2, 128, 128), (8, 8, 192, 128)]
CHUNKS = [(3, 0), (2, 1), (1, 1), (3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("a", "b"), CHUNKS)
@pytest.mark.parametrize("kind", CUTS)
def test_a_block(kind, a, b, shape):
  """Of two chunks, or of a chunk with itself, beside what attention to the whole row gave."""
  check(kind, np.arange(CHUNK) + a * CHUNK, np.arange(CHUNK) + b * CHUNK, shape, is_own=a == b)


@pytest.mark.parametrize("kind", CUTS)
def test_both_chunks_of_a_device(kind):
  both = np.r_[0:CHUNK, SEQ - CHUNK : SEQ]
  check(kind, both, both, SHAPES[1], is_own=True)


def check(kind, of_q, of_k, shape, *, is_own):
  ids = segment_ids(kind)
  q, k, v, dy = arrays(*shape)
  wide = lambda *xs: tuple(x.astype(jnp.float32) for x in xs)
  tokens = lambda at: TokenPositions(
    jnp.asarray(ids[:, at]), jnp.broadcast_to(at, (BATCH, len(at)))
  )
  rules = MaskRules(True, MAX_SEGMENTS)
  y, lse = whole(*wide(q, k, v), tokens(np.arange(SEQ)), tokens(np.arange(SEQ)), rules)
  q, y, lse, dy = (x[:, of_q] for x in (q, y, lse, dy))
  k, v, rules = k[:, of_k], v[:, of_k], rules._replace(is_diagonal=is_own)
  here = tokens(of_q), tokens(of_k)
  exact = blocks(Reference, rules, *wide(q, k, v), *here, y, lse, *wide(dy))
  found = blocks(cudnn, rules, q, k, v, *here, y.astype(jnp.bfloat16), lse, dy)
  for name, one, other in zip(("y", "lse", "dq", "dk", "dv"), found, exact, strict=True):
    one, other = np.asarray(one, np.float32), np.asarray(other)
    if name == "lse":  # -inf in the same places
      np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other))
      one, other = (np.where(np.isneginf(x), 0, x) for x in (one, other))
    assert np.isfinite(one).all(), name
    error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-3 * np.sqrt(other.size))
    assert error < TOLERANCE, (name, error)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", CUTS)
def test_a_ring_of_gpus(kind, with_sinks):
  ways = 2 if len(jax.devices()) < 4 else 4
  if len(jax.devices()) < ways:
    pytest.skip("a ring needs two GPUs")
  ids, (q, k, v, dy) = segment_ids(kind), arrays(*SHAPES[1])
  sinks = jnp.linspace(-1, 1, q.shape[2]) if with_sinks else None
  results = []
  for size, name in ((1, "xla"), (ways, "cudnn")):
    run = functools.partial(
      attention,
      segment_ids_BT=ids,
      max_segments=MAX_SEGMENTS,
      kernels=kernels_of("attention", name),
      along_row=Ring() if size > 1 else WHOLE_ROWS,
    )

    def loss(q, k, v, sinks, run=run):
      y = run(q, k, v, sinks_N=sinks)
      return jnp.sum(y.astype(jnp.float32) * np.asarray(dy, np.float32)), y

    args = [np.asarray(a, np.float32 if size == 1 else a.dtype) for a in (q, k, v)]
    with jax.set_mesh(make_test_mesh(1, 1, 1, context=size)):
      of = (0, 1, 2, 3) if with_sinks else (0, 1, 2)
      grads, y = jax.jit(jax.grad(loss, of, has_aux=True))(*args, sinks)
    results.append([np.asarray(a, np.float32) for a in (y, *grads)])
  for name, exact, found in zip(("y", "dq", "dk", "dv", "dsinks"), *results):  # noqa: B905
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert error < TOLERANCE, (name, error)
