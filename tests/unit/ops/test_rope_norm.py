"""RoPE and RMSNorm against their definitions in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.ops.rms_norm import rms_norm
from ats_jax.ops.rope import rope, rope_table

pytestmark = pytest.mark.compat

RTOL, ATOL = 1e-5, 1e-6
# An angle of up to 5000 radians is rounded to float32 (2^-24 of it) before its cosine is taken.
FAR_ATOL = 1e-3


def rotate(x, positions, theta):
  """Each pair (i, i + H/2) as a complex number times exp(i * position * frequency)."""
  half = x.shape[-1] // 2
  frequencies = theta ** (-np.arange(half) / half)
  angle = np.exp(1j * positions[..., None, None] * frequencies)
  z = (x[..., :half] + 1j * x[..., half:]) * angle
  return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_is_a_rotation_in_the_complex_plane(theta):
  x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
  positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 100, 2000]], np.int32)
  got = rope(x, rope_table(jnp.asarray(positions), 8, theta))
  np.testing.assert_allclose(got, rotate(x.astype(np.float64), positions, theta), RTOL, FAR_ATOL)
  np.testing.assert_array_equal(got[0, 0], x[0, 0])  # position 0 is the identity
  np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), RTOL)


@pytest.mark.parametrize("shift", [1, 37, 5000])
def test_scores_depend_on_distance_only(shift):
  rng = np.random.default_rng(1)
  q, k = (rng.normal(size=(1, 6, 1, 16)).astype(np.float32) for _ in range(2))
  positions = jnp.arange(6)[None]

  def scores(at):
    table = rope_table(at, 16, 10_000.0)
    return np.einsum("btnh,bsnh->bts", rope(q, table), rope(k, table))

  moved = scores(positions + shift)
  np.testing.assert_allclose(moved, scores(positions), atol=FAR_ATOL * 16, rtol=0)
  assert np.abs(scores(positions * 2) - scores(positions)).max() > 0.1  # distance does matter


def test_rope_keeps_the_dtype():
  x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
  assert rope(x, rope_table(jnp.arange(2)[None], 4, 1e4)).dtype == jnp.bfloat16


@pytest.mark.parametrize("scale_of_x", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(scale_of_x, eps):
  rng = np.random.default_rng(2)
  x = (rng.normal(size=(3, 4, 32)) * scale_of_x).astype(np.float32)
  scale = rng.normal(size=32).astype(np.float32)
  x64 = x.astype(np.float64)
  want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * scale
  np.testing.assert_allclose(rms_norm(x, scale, eps=eps), want, RTOL, ATOL)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
  # In bfloat16 the mean of 4096 squares is off by far more than the one rounding allowed here.
  x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 4096)), jnp.bfloat16)
  scale = jnp.full(4096, 1.5, jnp.bfloat16)
  got = rms_norm(x, scale, eps=1e-6)
  x64 = np.asarray(x, np.float64)
  want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * 1.5
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8)
