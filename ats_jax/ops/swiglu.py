"""The gate of a feed-forward. Letters: F d_ff."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_shards


class Gating(NamedTuple):
  """The activation of the gate, and how it is combined with the up projection. Static.

  Attributes:
    kind: "silu" (`swiglu`), "gelu_tanh" or "clamped" (`clamped_swiglu`).
    limit: the clamping limit of "clamped".
    slope: the slope of the sigmoid of "clamped".
  """

  kind: str
  limit: float
  slope: float


def gated(gate: jax.Array, up: jax.Array, gating: Gating, kernels: Kernels = XLA) -> jax.Array:
  """`activation(gate) * up`, or what `gating` says; only "silu" has a kernel.

  Args:
    gate: [..., d_ff].
    up: like `gate`.
    gating: the function.
    kernels: the chosen implementations.

  Returns:
    Array like `gate`.
  """
  if gating.kind == "silu":
    return swiglu(gate, up, kernels)
  if gating.kind == "clamped":
    return clamped_swiglu(gate, up, gating.limit, gating.slope)
  assert gating.kind == "gelu_tanh", gating.kind
  return (jax.nn.gelu(_wide(gate), approximate=True) * _wide(up)).astype(gate.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, slope: float) -> jax.Array:
  """`g * sigmoid(slope * g) * (u + 1)` of clamped g and u (gpt-oss, arXiv:2508.10925).

  In float32 or wider, rounded once.

  Args:
    gate: [..., d_ff]; `g = min(gate, limit)`.
    up: like `gate`; `u` is within `limit` on both sides.
    limit: above 0.
    slope: the slope of the sigmoid.

  Returns:
    Array like `gate`.
  """
  gate32, up32 = jnp.minimum(_wide(gate), limit), jnp.clip(_wide(up), -limit, limit)
  return (gate32 * jax.nn.sigmoid(slope * gate32) * (up32 + 1)).astype(gate.dtype)


def _clamped_forward(gate, up, limit, slope):
  return clamped_swiglu(gate, up, limit, slope), (gate, up)


def _clamped_backward(limit, slope, residuals, dy):
  gate, up = residuals
  gate32, up32 = jnp.minimum(_wide(gate), limit), jnp.clip(_wide(up), -limit, limit)
  dy32, sigmoid = _wide(dy), jax.nn.sigmoid(slope * gate32)
  slope_here = sigmoid * (1 + slope * gate32 * (1 - sigmoid))
  dgate = jnp.where(gate <= limit, dy32 * (up32 + 1) * slope_here, 0)
  dup = jnp.where(jnp.abs(up) <= limit, dy32 * gate32 * sigmoid, 0)
  return dgate.astype(gate.dtype), dup.astype(up.dtype)


clamped_swiglu.defvjp(_clamped_forward, _clamped_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def swiglu(gate: jax.Array, up: jax.Array, kernels: Kernels = XLA) -> jax.Array:
  """`silu(gate) * up` (Shazeer 2020, arXiv:2002.05202, eq. 6), in float32 or wider, rounded once.

  Args:
    gate: [..., d_ff].
    up: like `gate`.
    kernels: the chosen implementations.

  Returns:
    Array like `gate`.
  """
  kernel = registry.kernel("swiglu", "forward", kernels, **_dims(gate))
  if kernel is not None:
    return map_shards(lambda *a: (kernel(*a),), gate, up, out_like=(0,))[0]
  gate32, up32 = _wide(gate), _wide(up)
  return (gate32 * jax.nn.sigmoid(gate32) * up32).astype(gate.dtype)


def _forward(gate, up, kernels):
  return swiglu(gate, up, kernels), (gate, up)


def _backward(kernels, residuals, dy):
  gate, up = residuals
  kernel = registry.kernel("swiglu", "backward", kernels, **_dims(gate))
  if kernel is not None:
    return map_shards(kernel, gate, up, dy, out_like=(0, 1))
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
