"""AdamW over a list of leaves; clipping by the global norm is folded into the update."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, like

FLOATS = (jnp.float32, jnp.bfloat16)
NUM_PARTIALS = 1056  # blocks that sum squares: eight a multiprocessor of an H200
PER_BLOCK = 2048  # elements that a block updates: kAdamThreads * kPack


class Updated(NamedTuple):
  """What a step leaves behind; lists like the parameters.

  Attributes:
    params: parameters.
    mu: first moments.
    nu: second moments.
    grad_norm: float32, of the gradients before clipping.
  """

  params: list[jax.Array]
  mu: list[jax.Array]
  nu: list[jax.Array]
  grad_norm: jax.Array


def sum_squares(x: jax.Array) -> jax.Array:
  """Sum of squares in float32, the same bits in every run. Floor: one read of `x`.

  Args:
    x: float32 or bfloat16, any shape.

  Returns:
    float32 scalar.
  """
  expect("sum_squares", "x", x, x.shape, *FLOATS)
  out = jax.ShapeDtypeStruct((min(NUM_PARTIALS, max(1, x.size // 2048)),), jnp.float32)
  return jnp.sum(call("ats_sum_squares", out, x))


def adamw_leaf(
  param: jax.Array,
  grad: jax.Array,
  mu: jax.Array,
  nu: jax.Array,
  rates_4: jax.Array,
  *,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """One leaf's update, in place where the arrays are donated; float32 arithmetic.

  Floor: one read of all four and one write of three.

  Args:
    param: float32 or bfloat16, any shape.
    grad: the same shape; each of the four has a dtype of its own.
    mu: first moment.
    nu: second moment.
    rates_4: float32: factor of the gradient, learning rate, 1 - b1^t, 1 - b2^t.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled (arXiv:1711.05101), times the learning rate.

  Returns:
    New parameter and moments, and float32 sums of the squared direction, one a block.

  Raises:
    ValueError: another dtype or shape.
  """
  for name, x in {"param": param, "grad": grad, "mu": mu, "nu": nu}.items():
    expect("adamw", name, x, param.shape, *FLOATS)
  expect("adamw", "rates", rates_4, (4,), jnp.float32)
  squares = jax.ShapeDtypeStruct((-(-param.size // PER_BLOCK),), jnp.float32)
  return call(
    "ats_adamw",
    (like(param), like(mu), like(nu), squares),
    param,
    grad,
    mu,
    nu,
    rates_4,
    aliases={0: 0, 2: 1, 3: 2},
    b1=float(b1),
    b2=float(b2),
    eps=float(eps),
    decay=float(weight_decay),
  )


def adamw(
  params: Sequence[jax.Array],
  grads: Sequence[jax.Array],
  mu: Sequence[jax.Array],
  nu: Sequence[jax.Array],
  *,
  steps: jax.Array,
  learning_rate: jax.Array | float,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  decays: Sequence[bool],
  max_norm: float | None,
) -> Updated:
  """Clip by the global norm and update: `p -= lr * (m' / (sqrt(v') + eps) + decay * p)`.

  The clipped gradient is never written. Floor in bytes: that of `adamw_leaf` for each leaf, and
  one more read of the gradients for the norm.

  Args:
    params: leaves, float32 or bfloat16.
    grads: like the parameters in shape.
    mu: first moments.
    nu: second moments.
    steps: int32 scalar, this update included.
    learning_rate: scalar.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled.
    decays: whether each leaf decays.
    max_norm: gradients with a larger norm are scaled down to it; None = never.

  Raises:
    ValueError: lists of unequal length; another dtype or shape.
  """
  lengths = [len(x) for x in (params, grads, mu, nu, decays)]
  if len(set(lengths)) != 1:
    raise ValueError(f"adamw: lists of {lengths} leaves, expected equal lengths")
  norm = jnp.sqrt(jnp.sum(jnp.stack([sum_squares(g) for g in grads])))
  # As optax: a norm of exactly max_norm is scaled by 1, one of NaN stays NaN.
  clip = jnp.ones((), jnp.float32)
  if max_norm is not None:
    clip = jnp.where(norm < max_norm, 1.0, max_norm / norm)
  t = steps.astype(jnp.float32)
  lr = jnp.asarray(learning_rate, jnp.float32)
  rates_4 = jnp.stack([clip, lr, 1.0 - jnp.float32(b1) ** t, 1.0 - jnp.float32(b2) ** t])
  new = [
    adamw_leaf(*leaf, rates_4, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay * decay)[:3]
    for *leaf, decay in zip(params, grads, mu, nu, decays, strict=True)
  ]
  return Updated(*(list(x) for x in zip(*new, strict=True)), norm)
