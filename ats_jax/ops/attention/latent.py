"""Causal attention to a cache of latents, of which all heads' keys and values are made.

Letters: B batch, T queries, S slots, N heads, C width of a latent, R of the rotated part of a key.
"""

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import island

Q_AXES = ("batch", "seq", "heads", "head_dim")
LATENT_AXES = ("batch", "seq", "latent")
TOKEN_AXES = ("batch", "seq")


def cached_latent_attention(
  q_BTNC: jax.Array,
  turned_BTNR: jax.Array,
  latent_BTC: jax.Array,
  rotated_BTR: jax.Array,
  latent_cache_BSC: jax.Array,
  rotated_cache_BSR: jax.Array,
  index_BT: jax.Array,
  *,
  scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Write new latents into a cache, then attend to it; softmax in float32.

  A slot's score is `scale * (q . latent + turned . rotated)`.

  Args:
    q_BTNC: what meets the latents of the slots.
    turned_BTNR: what meets the rotated parts of their keys.
    latent_BTC: latents of the new tokens.
    rotated_BTR: rotated parts of their keys.
    latent_cache_BSC: latents so far, S slots.
    rotated_cache_BSR: rotated parts so far.
    index_BT: int32 slot of each new token; a query sees the slots up to its own.
    scale: the factor of the scores.

  Returns:
    Means of latents [batch, seq, heads, C], and the two caches with the new tokens in their slots.
  """

  def local(q, turned, latent, rotated, latent_cache, rotated_cache, index):
    rows = jnp.arange(q.shape[0])[:, None]
    latent_cache = latent_cache.at[rows, index].set(latent.astype(latent_cache.dtype))
    rotated_cache = rotated_cache.at[rows, index].set(rotated.astype(rotated_cache.dtype))
    y = attend_to_latents(q, turned, latent_cache, rotated_cache, index, scale)
    return y, latent_cache, rotated_cache

  return island(
    local,
    in_axes=(Q_AXES, Q_AXES, LATENT_AXES, LATENT_AXES, LATENT_AXES, LATENT_AXES, TOKEN_AXES),
    out_axes=(Q_AXES, LATENT_AXES, LATENT_AXES),
  )(
    q_BTNC, turned_BTNR, latent_BTC, rotated_BTR, latent_cache_BSC, rotated_cache_BSR, index_BT
  )  # fmt: skip


def attend_to_latents(q_BTNC, turned_BTNR, latent_BSC, rotated_BSR, index_BT, scale) -> jax.Array:
  """Attention of local arrays whose query sees the slots up to its own."""
  wide = jnp.promote_types(q_BTNC.dtype, jnp.float32)
  scores_BNTS = jnp.einsum("BTNC,BSC->BNTS", q_BTNC, latent_BSC, preferred_element_type=wide)
  scores_BNTS += jnp.einsum("BTNR,BSR->BNTS", turned_BTNR, rotated_BSR, preferred_element_type=wide)
  visible_BTS = jnp.arange(latent_BSC.shape[1]) <= index_BT[:, :, None]
  scores_BNTS = jnp.where(visible_BTS[:, None], scale * scores_BNTS, -jnp.inf)
  weights_BNTS = jax.nn.softmax(scores_BNTS).astype(q_BTNC.dtype)
  return jnp.einsum("BNTS,BSC->BTNC", weights_BNTS, latent_BSC)
