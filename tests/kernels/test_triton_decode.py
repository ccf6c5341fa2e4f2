"""Attention to pages in Triton, in its interpreter, beside XLA's version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter

from ats_jax.ops.attention.paged import narrowed, paged_attention, slot_of
from ats_jax.ops.registry import Kernels
from kernels_triton import decode_slots, plan

pytestmark = pytest.mark.hf
pytest.importorskip("triton")

HEADS, KV_HEADS, WIDTH, PAGE, ROW_PAGES = 6, 2, 16, 32, 5
LENGTHS = [1, 31, 32, 33, 97, 160, 0]


@pytest.fixture(scope="module")
def interpreter():
  with triton_interpreter.interpreter() as with_blocks:
    yield with_blocks


def drawn(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
  ("options", "programs"),
  [({}, 264), ({}, 36), ({}, 12), ({"window": 40}, 264), ({"soft_cap": 2.0}, 264)],
  ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_attention_of_one_token_to_pages(dtype, options, programs, interpreter, monkeypatch):
  monkeypatch.setattr(decode_slots, "call", interpreter(block_n=32))
  monkeypatch.setattr(plan, "PROGRAMS", programs)  # so 5 parts of a row, 3, or 1
  rows = len(LENGTHS)
  pages = np.random.default_rng(3).permutation(rows * ROW_PAGES + 3)[: rows * ROW_PAGES]
  table = jnp.asarray(pages.reshape(rows, ROW_PAGES), jnp.int32)
  q = drawn(0, rows, 1, HEADS, WIDTH)
  k, v = (drawn(n, rows * ROW_PAGES + 3, PAGE, KV_HEADS, WIDTH) for n in (1, 2))
  # What lies behind a row's end has no effect.
  at = np.arange(ROW_PAGES * PAGE).reshape(ROW_PAGES, PAGE)
  for row, length in enumerate(LENGTHS):
    unread = jnp.asarray(at >= length - 1)[..., None, None]
    k = k.at[table[row]].set(jnp.where(unread, 1e4, k[table[row]]))
  pages = (jnp.concatenate([k, v], axis=-1),)
  if dtype != "float32":
    of_parts = zip(*(narrowed(x, jnp.dtype(dtype)) for x in (k, v)), strict=True)
    pages = tuple(jnp.concatenate(of, axis=-1) for of in of_parts)
  new = (q, *(drawn(n, rows, 1, KV_HEADS, WIDTH) for n in (4, 5)))
  index = jnp.array(LENGTHS, jnp.int32)[:, None] - 1
  kernels = Kernels(((f"paged_attention.{slot_of(pages[0].dtype)}", "triton"),))
  run = lambda *args: paged_attention(*args, kernels=kernels, **options)
  got, written = jax.jit(run)(*new, pages, table, index)
  want, pages = paged_attention(*new, pages, table, index, **options)
  of_rows = slice(None, -1)  # the last one has no token: what it gets is of no use
  np.testing.assert_allclose(got[of_rows], want[of_rows], rtol=2e-5, atol=2e-5)
  assert np.all(np.isfinite(got))
  for array, expected in zip(written, pages, strict=True):
    np.testing.assert_array_equal(array, expected)
