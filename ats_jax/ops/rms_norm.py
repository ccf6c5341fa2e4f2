"""RMSNorm."""

import functools

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_shards


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float, kernels: Kernels = XLA) -> jax.Array:
  """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, computed in float32 or wider.

  Args:
    x: activations [..., dim], whose last axis is not sharded.
    scale: [dim].
    eps: added to the mean square.
    kernels: the chosen implementations.

  Returns:
    Array like `x`.
  """
  return _rms_norm(x, scale, eps, kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, scale, eps, kernels):
  kernel = registry.kernel("rms_norm", "forward", kernels, **_dims(x))
  if kernel is not None:
    return map_shards(lambda *a: (kernel(*a, eps=eps),), x, scale, out_like=(0,))[0]
  if x.size > x.shape[-1]:
    return _normal(x, scale, eps)
  # XLA for GPUs joins the norm of rows with the matmul behind it (and a gate behind that), but not
  # the norm of a single row: that takes two more kernels. So it gets another one, which is 0.
  number = jax.lax.broadcasted_iota(jnp.int32, (2, *(1 for _ in x.shape)), 0)
  return _normal(jnp.where(number == 0, x, 0), scale, eps)[0]


def _normal(x, scale, eps):
  x32 = _wide(x)
  return (x32 * _inverse_rms(x32, eps) * scale.astype(x32.dtype)).astype(x.dtype)


def _forward(x, scale, eps, kernels):
  return _rms_norm(x, scale, eps, kernels), (x, scale)


def _backward(eps, kernels, residuals, dy):
  x, scale = residuals
  kernel = registry.kernel("rms_norm", "backward", kernels, **_dims(x))
  if kernel is not None:
    run = functools.partial(kernel, eps=eps)
    dx, dscale_PD = map_shards(run, x, scale, dy, out_like=(0, None))
    return dx, jnp.sum(dscale_PD, axis=0).astype(scale.dtype)
  x32, dy32 = _wide(x), _wide(dy)
  inverse_rms = _inverse_rms(x32, eps)
  normal, dnormal = x32 * inverse_rms, dy32 * scale.astype(x32.dtype)
  dx = inverse_rms * (dnormal - normal * jnp.mean(dnormal * normal, axis=-1, keepdims=True))
  dscale = jnp.sum(dy32 * normal, axis=tuple(range(x.ndim - 1)))
  return dx.astype(x.dtype), dscale.astype(scale.dtype)


_rms_norm.defvjp(_forward, _backward)


def _inverse_rms(x32, eps):
  return jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def _dims(x):
  return dict(rows=x.size // x.shape[-1], dim=x.shape[-1])


def _wide(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
