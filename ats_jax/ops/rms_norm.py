"""RMSNorm."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
  """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, computed in float32 or wider.

  Args:
    x: activations [..., dim].
    scale: [dim].
    eps: added to the mean square.

  Returns:
    Array like `x`.
  """
  x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
  return (x32 * inverse_rms * scale.astype(x32.dtype)).astype(x.dtype)
