"""From logits to a token."""

import jax
import jax.numpy as jnp


def sample(
  logits_BV: jax.Array, key: jax.Array, *, temperature: float, top_k: int, top_p: float
) -> jax.Array:
  """Draw one token a row.

  Args:
    logits_BV: float32 [batch, vocab]; -inf never comes out.
    key: of this draw.
    temperature: divides the logits; 0 = the likeliest token, and the rest is ignored.
    top_k: keep the k likeliest (ties with the k-th stay); 0 = all.
    top_p: then keep the likeliest whose probabilities first reach p (Holtzman et al. 2020,
      arXiv:1904.09751), at least one; 1 = all.

  Returns:
    int32 [batch].
  """
  if temperature == 0.0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  # The largest is 0 first, so that no temperature makes two of them infinite.
  logits_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temperature
  if 0 < top_k < logits_BV.shape[-1]:
    kth_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
    logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
  if top_p < 1.0:
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1) - jax.nn.softmax(sorted_BV)
    last_B1 = jnp.sum(before_BV < top_p, axis=-1, keepdims=True) - 1
    floor_B1 = jnp.take_along_axis(sorted_BV, jnp.maximum(last_B1, 0), axis=-1)
    logits_BV = jnp.where(logits_BV < floor_B1, -jnp.inf, logits_BV)
  return jax.random.categorical(key, logits_BV).astype(jnp.int32)
