"""`silu(gate) * up`, elementwise."""

import math

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, expect_packs, like


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """`gate * sigmoid(gate) * up`, computed in float32 and rounded once. Floor: 6 bytes an element.

  Args:
    gate: bfloat16, any shape with a multiple of 8 elements.
    up: like `gate`.

  Returns:
    Array like `gate`.

  Raises:
    ValueError: another dtype or shape.
  """
  _check(gate, up=up)
  return call("ats_swiglu_forward", like(gate), gate, up)


def swiglu_backward(gate: jax.Array, up: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gradients of `swiglu` by `gate` and `up`, given that of its result; all like `gate`.

  Floor: 10 bytes an element.
  """
  _check(gate, up=up, dout=dout)
  return call("ats_swiglu_backward", (like(gate), like(up)), gate, up, dout)


def _check(gate, **others):
  for name, x in {"gate": gate, **others}.items():
    expect("swiglu", name, x, gate.shape, jnp.bfloat16)
  expect_packs("swiglu", math.prod(gate.shape))
