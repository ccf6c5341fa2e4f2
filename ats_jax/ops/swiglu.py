"""The gate of a feed-forward. Letters: F d_ff."""

import functools

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import in_place


def gated(
  gate: jax.Array, up: jax.Array, activation: str = "silu", kernels: Kernels = XLA
) -> jax.Array:
  """`activation(gate) * up`; "gelu_tanh" has no kernel.

  Args:
    gate: [..., d_ff].
    up: like `gate`.
    activation: "silu" (`swiglu`) or "gelu_tanh".
    kernels: what runs.

  Returns:
    Array like `gate`.
  """
  if activation == "silu":
    return swiglu(gate, up, kernels)
  assert activation == "gelu_tanh", activation
  return (jax.nn.gelu(_wide(gate), approximate=True) * _wide(up)).astype(gate.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def swiglu(gate: jax.Array, up: jax.Array, kernels: Kernels = XLA) -> jax.Array:
  """`silu(gate) * up` (Shazeer 2020, arXiv:2002.05202, eq. 6), in float32 or wider, rounded once.

  Args:
    gate: [..., d_ff].
    up: like `gate`.
    kernels: what runs.

  Returns:
    Array like `gate`.
  """
  kernel = registry.kernel("swiglu", "forward", kernels, **_dims(gate))
  if kernel is not None:
    return in_place(lambda *a: (kernel(*a),), gate, up, out_like=(0,))[0]
  gate32, up32 = _wide(gate), _wide(up)
  return (gate32 * jax.nn.sigmoid(gate32) * up32).astype(gate.dtype)


def _forward(gate, up, kernels):
  return swiglu(gate, up, kernels), (gate, up)


def _backward(kernels, residuals, dy):
  gate, up = residuals
  kernel = registry.kernel("swiglu", "backward", kernels, **_dims(gate))
  if kernel is not None:
    return in_place(kernel, gate, up, dy, out_like=(0, 1))
  gate32, up32, dy32 = _wide(gate), _wide(up), _wide(dy)
  sigmoid = jax.nn.sigmoid(gate32)
  silu = gate32 * sigmoid
  dgate = dy32 * up32 * (sigmoid + silu * (1 - sigmoid))
  return dgate.astype(gate.dtype), (dy32 * silu).astype(up.dtype)


swiglu.defvjp(_forward, _backward)


def _dims(gate):
  return dict(rows=gate.size // gate.shape[-1], d_ff=gate.shape[-1])


def _wide(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
