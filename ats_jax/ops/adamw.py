"""Clip and AdamW in one pass over a parameter."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import in_place


class Rates(NamedTuple):
  """Traced float32 scalars of one update.

  Attributes:
    clip: what gradients are multiplied by, see `clip_scale`.
    lr: the learning rate.
    bias1: 1 - b1^steps.
    bias2: 1 - b2^steps.
  """

  clip: jax.Array | float
  lr: jax.Array | float
  bias1: jax.Array | float
  bias2: jax.Array | float


class Updated(NamedTuple):
  """What `adamw` returns: the new values, and the squared norm of the direction (float32)."""

  param: jax.Array
  mu: jax.Array
  nu: jax.Array
  squares: jax.Array


def clip_scale(grads: Any, max_norm: float) -> jax.Array:
  """What brings gradients to the global norm `max_norm` if they are above it, float32 scalar.

  The clipped gradients never exist: `adamw` multiplies as it reads.

  Args:
    grads: a tree of arrays.
    max_norm: 0 = never clip.
  """
  if not max_norm:
    return jnp.ones((), jnp.float32)
  squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
  norm = jnp.sqrt(sum(squares))
  return jnp.where(norm < max_norm, 1.0, max_norm / norm)


def adamw(
  param: jax.Array,
  grad: jax.Array,
  mu: jax.Array,
  nu: jax.Array,
  rates: Rates,
  *,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  kernels: Kernels = XLA,
) -> Updated:
  """One parameter's AdamW update (arXiv:1711.05101), float32 arithmetic, each result rounded once.

  Args:
    param: any shape.
    grad: like it, not clipped.
    mu: first moment, in a dtype of its own.
    nu: second moment, likewise.
    rates: what changes from step to step.
    b1: decay of the first moment.
    b2: decay of the second.
    eps: added to the root.
    weight_decay: 0 for what does not decay.
    kernels: what runs.
  """
  constants = dict(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
  kernel = registry.kernel("adamw", "update", kernels, rows=param.size)
  if kernel is not None:
    rates_4 = jnp.stack([jnp.asarray(r, jnp.float32) for r in rates])
    run = functools.partial(kernel, **constants)
    like = (0, 2, 3, None)
    param, mu, nu, squares_P = in_place(run, param, grad, mu, nu, rates_4, out_like=like)
    return Updated(param, mu, nu, jnp.sum(squares_P))
  g, p, m, v = (a.astype(jnp.float32) for a in (grad, param, mu, nu))
  g *= rates.clip
  m = b1 * m + (1.0 - b1) * g
  v = b2 * v + (1.0 - b2) * jnp.square(g)
  # One division an element: with more, XLA on a GPU writes the direction out for its norm.
  unbiased, root = m * (1.0 / rates.bias1), jnp.sqrt(v * (1.0 / rates.bias2))
  direction = unbiased / (root + eps) + weight_decay * p
  p -= rates.lr * direction
  squares = jnp.sum(jnp.square(direction))
  return Updated(p.astype(param.dtype), m.astype(mu.dtype), v.astype(nu.dtype), squares)
