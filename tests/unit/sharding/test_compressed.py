"""Gradients in 8 bits: how far rounding goes, and what stays visible."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ats_jax.sharding.compressed import BLOCK, MOST, dequantise, quantise

# Below the smallest normal number a CPU may take a scale for zero.
FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
SPARSE = hnp.arrays(np.float32, (2, BLOCK), elements=FINITE, fill=st.just(0.0))


@hypothesis.given(SPARSE)
def test_an_error_is_half_a_step_of_its_block_at_most(x):
  q = quantise(jnp.asarray(x))
  assert q.values.dtype == jnp.int8 and q.scales.shape == (2,)
  largest = np.abs(x).max(axis=-1, keepdims=True)
  off = np.abs(np.asarray(dequantise(q)) - x)
  assert (off <= (0.5 + 1e-4) * largest / MOST + 1e-37).all()
  assert np.abs(np.asarray(q.values, np.int32)).max() <= MOST


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
