"""Gradients in 8 bits: how far rounding goes, and what stays visible."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ats_jax.sharding.compressed import BLOCK, FORMAT_MAX, dequantise, quantise

# Below the smallest normal number a CPU may take a scale for zero.
FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
SPARSE = hnp.arrays(np.float32, (2, BLOCK), elements=FINITE, fill=st.just(0.0))


@hypothesis.given(SPARSE)
def test_a_value_is_off_by_a_sixteenth_or_half_of_the_least_step(x):
  q = quantise(jnp.asarray(x))
  assert q.bits.dtype == jnp.int8 and q.scales.shape == (2,)
  scale = np.abs(x).max(axis=-1, keepdims=True) / FORMAT_MAX
  off = np.abs(np.asarray(dequantise(q)) - x)
  most = np.maximum(np.abs(x) / 16, scale * 2.0**-10)
  assert (off <= 1.01 * most + 1e-37).all()  # it may be rounded twice, by way of float16


def test_zeros_stay_and_the_largest_value_is_kept():
  x = np.zeros((2, BLOCK), np.float32)
  x[1, 7] = -3.25
  np.testing.assert_allclose(dequantise(quantise(jnp.asarray(x))), x, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_its_block_alone(bad):
  x = np.ones((3, BLOCK), np.float32)
  x[1, 5] = bad
  found = np.asarray(dequantise(quantise(jnp.asarray(x))))
  assert np.isnan(found[1]).all()
  np.testing.assert_allclose(found[[0, 2]], 1.0, rtol=1e-6)
