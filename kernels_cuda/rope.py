"""Rotary position embedding."""

import jax
import jax.numpy as jnp

from kernels_cuda.checks import PACK, call, expect, like


def rope(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Each pair (i, i + H/2) turned by its angle, computed in float32 and rounded once.

  With `-sin` it turns back, which is the gradient. Floor: 4 bytes an element and 8 bytes for each
  element of a table.

  Args:
    x_BTNH: bfloat16 [batch, seq, heads, head_dim]; head_dim a multiple of 16.
    cos: cosines of the angles, float32 [batch, seq, 1, head_dim / 2].
    sin: sines, like `cos`.

  Returns:
    Array like `x_BTNH`.

  Raises:
    ValueError: another dtype or shape.
  """
  batch, seq, _, head_dim = expect("rope", "x", x_BTNH, (None,) * 4, jnp.bfloat16)
  if head_dim % (2 * PACK):
    raise ValueError(f"rope: heads have {head_dim} elements, expected a multiple of {2 * PACK}")
  for name, table in {"cos": cos, "sin": sin}.items():
    expect("rope", name, table, (batch, seq, 1, head_dim // 2), jnp.float32)
  return call("ats_rope", like(x_BTNH), x_BTNH, cos, sin)
