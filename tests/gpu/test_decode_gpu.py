"""Attention of one token to its pages by Triton on a GPU, beside XLA's in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.ops.attention.paged import narrowed, paged_attention, slot_of
from ats_jax.ops.registry import Kernels

pytestmark = pytest.mark.gpu

ROWS, HEADS, KV_HEADS, WIDTH, PAGE, ROW_PAGES, STEPS = 24, 32, 8, 64, 64, 20, 70


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_steps_write_pages_and_read_them(dtype, options):
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
  count = ROWS * ROW_PAGES + 5
  table = jnp.asarray(rng.permutation(count)[: ROWS * ROW_PAGES].reshape(ROWS, -1), jnp.int32)
  k, v = (drawn(count, PAGE, KV_HEADS, WIDTH) for _ in range(2))
  pages = (jnp.concatenate([k, v], axis=-1),)
  if dtype != "bfloat16":
    of_parts = zip(*(narrowed(x, jnp.dtype(dtype)) for x in (k, v)), strict=True)
    pages = tuple(jnp.concatenate(of, axis=-1) for of in of_parts)
  lengths = jnp.asarray(rng.integers(0, ROW_PAGES * PAGE - STEPS, (ROWS, 1)), jnp.int32)
  triton = Kernels(((f"paged_attention.{slot_of(pages[0].dtype)}", "triton"),))
  step = lambda kernels: jax.jit(
    lambda *args: paged_attention(*args, kernels=kernels, **options), donate_argnums=3
  )
  by_triton, by_xla = step(triton), step(Kernels())
  copy = lambda arrays: tuple(jnp.array(x) for x in arrays)
  got_pages, want_pages = copy(pages), copy(pages)
  for at in range(STEPS):  # over the end of a page
    new = (drawn(ROWS, 1, HEADS, WIDTH), *(drawn(ROWS, 1, KV_HEADS, WIDTH) for _ in range(2)))
    got, got_pages = by_triton(*new, got_pages, table, lengths + at)
    want, want_pages = by_xla(*new, want_pages, table, lengths + at)
    of = np.asarray(want, np.float32)
    error = np.linalg.norm(np.asarray(got, np.float32) - of) / np.linalg.norm(of)
    assert error < 6e-3, at  # two results in bfloat16
  for array, expected in zip(got_pages, want_pages, strict=True):
    np.testing.assert_array_equal(array, expected)
