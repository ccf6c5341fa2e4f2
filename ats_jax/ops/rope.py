"""Rotary position embedding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import in_place


def rope_table(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines of the rotary angles (Su et al. 2021, arXiv:2104.09864, eq. 15).

  Args:
    positions_BT: int32 [batch, seq].
    head_dim: even width of one head.
    theta: base of the frequencies.

  Returns:
    Two float32 arrays [batch, seq, 1, head_dim / 2].
  """
  frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  angles = positions_BT[..., None, None] * jnp.asarray(frequencies, jnp.float32)
  return jnp.cos(angles), jnp.sin(angles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rope(
  x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array], kernels: Kernels = XLA
) -> jax.Array:
  """Rotate each pair (i, i + head_dim/2) by its angle, in float32 or wider.

  Args:
    x_BTNH: queries or keys [batch, seq, heads, head_dim].
    table: from `rope_table`; it gets no gradient.
    kernels: what runs.

  Returns:
    Array like `x_BTNH`.
  """
  cos, sin = table
  return _rotate("forward", x_BTNH, cos, sin, kernels)


def _forward(x_BTNH, table, kernels):
  return rope(x_BTNH, table, kernels), table


def _backward(kernels, table, dy_BTNH):
  cos, sin = table
  return _rotate("backward", dy_BTNH, cos, -sin, kernels), None  # a rotation's transpose turns back


rope.defvjp(_forward, _backward)


def _rotate(slot, x_BTNH, cos, sin, kernels):
  dims = dict(rows=x_BTNH.shape[0] * x_BTNH.shape[1], head_dim=x_BTNH.shape[-1])
  kernel = registry.kernel("rope", slot, kernels, heads=x_BTNH.shape[2], **dims)
  if kernel is not None:
    return in_place(lambda *a: (kernel(*a),), x_BTNH, cos, sin, out_like=(0,))[0]
  first, second = jnp.split(x_BTNH.astype(jnp.promote_types(x_BTNH.dtype, jnp.float32)), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)
