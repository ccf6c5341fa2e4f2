"""Clip and AdamW in one pass over a parameter."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_shards


class UpdateScalars(NamedTuple):
  """Traced float32 scalars of one update.

  Attributes:
    clip: the factor of the gradients (`clip_scale`).
    lr: the learning rate.
    bias1: 1 - b1^steps.
    bias2: 1 - b2^steps.
  """

  clip: jax.Array | float
  lr: jax.Array | float
  bias1: jax.Array | float
  bias2: jax.Array | float


class AdamWResult(NamedTuple):
  """The result of `adamw_update`: new values, and the squared norm of the direction (float32)."""

  param: jax.Array
  mu: jax.Array
  nu: jax.Array
  squares: jax.Array


def clip_scale(grads: Any, max_norm: float) -> jax.Array:
  """The factor that clips gradients to the global norm `max_norm`, a float32 scalar.

  The clipped gradients never exist: `adamw_update` multiplies as it reads.

  Args:
    grads: a tree of arrays.
    max_norm: 0 = never clip.
  """
  if not max_norm:
    return jnp.ones((), jnp.float32)
  squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
  norm = jnp.sqrt(sum(squares))
  return jnp.where(norm < max_norm, 1.0, max_norm / norm)


def adamw_update(
  param: jax.Array,
  grad: jax.Array,
  mu: jax.Array,
  nu: jax.Array,
  rates: UpdateScalars,
  *,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  kernels: Kernels = XLA,
) -> AdamWResult:
  """One parameter's AdamW update (arXiv:1711.05101), float32 arithmetic, each result rounded once.

  Args:
    param: any shape.
    grad: the gradient before clipping, shaped like `param`.
    mu: first moment, in any dtype.
    nu: second moment, in any dtype.
    rates: the scalars that change from step to step.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: weight decay; 0 = none.
    kernels: the chosen implementations.
  """
  constants = dict(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
  kernel = registry.kernel("adamw", "update", kernels, rows=param.size)
  if kernel is not None:
    rates_4 = jnp.stack([jnp.asarray(r, jnp.float32) for r in rates])
    run = functools.partial(kernel, **constants)
    like = (0, 2, 3, None)
    param, mu, nu, squares_P = map_shards(run, param, grad, mu, nu, rates_4, out_like=like)
    return AdamWResult(param, mu, nu, jnp.sum(squares_P))
  g, p, m, v = (a.astype(jnp.float32) for a in (grad, param, mu, nu))
  g *= rates.clip
  m = b1 * m + (1.0 - b1) * g
  v = b2 * v + (1.0 - b2) * jnp.square(g)
  # One division an element: with more, XLA on a GPU writes the direction out for its norm.
  unbiased, root = m * (1.0 / rates.bias1), jnp.sqrt(v * (1.0 / rates.bias2))
  direction = unbiased / (root + eps) + weight_decay * p
  p -= rates.lr * direction
  squares = jnp.sum(jnp.square(direction))
  return AdamWResult(p.astype(param.dtype), m.astype(mu.dtype), v.astype(nu.dtype), squares)
