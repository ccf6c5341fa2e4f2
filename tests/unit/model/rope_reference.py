"""Rotary positions by their definition, for references that are written out."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """x [T, H]; pairs (i, i + H/2)."""
  half = x.shape[-1] // 2
  angle = positions[:, None] * theta ** (-jnp.arange(half) / half)
  a, b = x[:, :half], x[:, half:]
  return jnp.concatenate(
    [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
  )
