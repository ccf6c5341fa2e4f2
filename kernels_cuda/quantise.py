"""Casts to 8 bits that also transpose: cuBLASLt wants both operands along the contraction."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect

MULTIPLE = 16  # of both dimensions: what a thread writes at once


def transposed(x: jax.Array, scale: jax.Array, *, dtype: Any) -> jax.Array:
  """`(x / scale).T` in 8 bits: to the nearest, saturating; what is not finite becomes NaN.

  Floor: 3 bytes an element.

  Args:
    x: bfloat16 [rows, columns], both multiples of 16.
    scale: float32 scalar, a power of two.
    dtype: float8_e4m3fn or float8_e5m2.

  Returns:
    [columns, rows] in `dtype`.

  Raises:
    ValueError: another dtype or shape.
  """
  rows, columns = _check(x, scale, dtype)
  out = jax.ShapeDtypeStruct((columns, rows), dtype)
  return call("ats_quantise_transposed", out, x, scale)


def both(x: jax.Array, scale: jax.Array, *, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """`x / scale` and its transpose in 8 bits, out of one read. Floor: 4 bytes an element.

  Args and errors as of `transposed`; returns [rows, columns] and [columns, rows].
  """
  rows, columns = _check(x, scale, dtype)
  out = (jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct((columns, rows), dtype))
  return call("ats_quantise_both", out, x, scale)


def _check(x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[int, ...]:
  expect("quantise", "scale", scale, (), jnp.float32)
  shape = expect("quantise", "x", x, (None, None), jnp.bfloat16)
  if any(size % MULTIPLE for size in shape):
    raise ValueError(f"quantise: x is {list(shape)}, expected multiples of {MULTIPLE}")
  if dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
    name = jnp.dtype(dtype).name
    raise ValueError(f"quantise: dtype is {name}, expected float8_e4m3fn or float8_e5m2")
  return shape
