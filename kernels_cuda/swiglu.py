"""`silu(gate) * up`, elementwise."""

import math

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, expect_packs, like


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """`gate * sigmoid(gate) * up`, computed in float32 and rounded once.

  Floor: 6 bytes an element forward, 10 backward.

  Args:
    gate: bfloat16, any shape with a multiple of 8 elements.
    up: like `gate`.

  Returns:
    Array like `gate`.

  Raises:
    ValueError: another dtype or shape.
  """
  _check(gate, up)
  return call("ats_swiglu_forward", like(gate), gate, up)


def _forward(gate, up):
  return swiglu(gate, up), (gate, up)


def _backward(residuals, dout):
  return swiglu_backward(*residuals, dout)


swiglu.defvjp(_forward, _backward)


def swiglu_backward(gate: jax.Array, up: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gradients of `swiglu` by `gate` and `up`, given that of its result; all like `gate`."""
  _check(gate, up, dout)
  return call("ats_swiglu_backward", (like(gate), like(up)), gate, up, dout)


def _check(gate, *others):
  names = ("up", "dout")
  expect("swiglu", "gate", gate, gate.shape, jnp.bfloat16)
  for name, x in zip(names, others, strict=False):
    expect("swiglu", name, x, gate.shape, jnp.bfloat16)
  expect_packs("swiglu", math.prod(gate.shape))
