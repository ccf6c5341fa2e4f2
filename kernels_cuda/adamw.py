"""AdamW of one parameter; clipping by the global norm is a factor of the gradient."""

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, like

FLOATS = (jnp.float32, jnp.bfloat16)
PER_BLOCK = 2048  # elements that a block updates: kAdamThreads * kPack


def adamw(
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
  """`p -= lr * (m' / (sqrt(v') + eps) + weight_decay * p)`, in place where arrays are donated.

  Float32 arithmetic. Floor: one read of all four and one write of three.

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
