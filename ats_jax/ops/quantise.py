"""Casts to 8 bits with one scale for an array, also transposed.

Letters: R rows, C columns.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MAX_EXPONENT = 60  # of a scale, so that the product of two is a normal float32


def scale_of(dtype: Any, amax: jax.Array) -> jax.Array:
  """The least power of two that scales `amax` into the range of `dtype`, as float32.

  Args:
    dtype: float8_e4m3fn or float8_e5m2.
    amax: the largest absolute value, float32 scalar.
  """
  _, exponent = jnp.frexp(amax / float(jnp.finfo(dtype).max))
  return jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT))


def cast(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
  """`x / scale` in 8 bits: to the nearest, ties to even.

  What is larger than the range saturates; what is not finite becomes NaN, and so does a quotient
  that float32 cannot hold.

  Args:
    x: any floating-point array.
    scale: float32 scalar, a power of two.
    dtype: float8_e4m3fn or float8_e5m2.
  """
  largest = float(jnp.finfo(dtype).max)
  scaled = x.astype(jnp.float32) * (1 / scale)
  scaled = jnp.where(jnp.isfinite(scaled), jnp.clip(scaled, -largest, largest), jnp.nan)
  return scaled.astype(dtype)


def cast_transposed(
  x_RC: jax.Array, scale: jax.Array, dtype: Any, kernels: Kernels = XLA
) -> jax.Array:
  """`cast(x).T`, [C, R], of a local array.

  Args:
    x_RC: array of rows and columns.
    scale: as in `cast`.
    dtype: as in `cast`.
    kernels: the chosen implementations.
  """
  kernel = registry.kernel("quantise", "transposed", kernels, **_dims(x_RC))
  if kernel is not None:
    return kernel(x_RC, scale, dtype=dtype)
  return cast(x_RC, scale, dtype).T


def cast_and_transpose(
  x_RC: jax.Array, scale: jax.Array, dtype: Any, kernels: Kernels = XLA
) -> tuple[jax.Array, jax.Array]:
  """`cast(x)` and its transpose, [R, C] and [C, R]; arguments as in `cast_transposed`."""
  kernel = registry.kernel("quantise", "both", kernels, **_dims(x_RC))
  if kernel is not None:
    return kernel(x_RC, scale, dtype=dtype)
  x8_RC = cast(x_RC, scale, dtype)
  return x8_RC, x8_RC.T


def _dims(x_RC):
  return dict(rows=x_RC.shape[0], columns=x_RC.shape[1])
