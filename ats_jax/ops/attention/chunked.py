"""Causal attention by XLA, a chunk of queries at a time: scores of a chunk only are in memory.

Letters: B batch, C queries of a chunk, S keys up to its end, N query heads, K key/value heads, H
head_dim, V width of a value.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import Config
from ats_jax.ops.remat import ATTENTION_RESULTS

CHUNK = 512  # queries
LEAST_ROW = 1024  # tokens, up to which all scores of a row at once are faster and small


def reserve(cfg: Config) -> str:
  """Why it is no default for a config, "" if it is."""
  seq = cfg.data.seq_len
  return f"data.seq_len is {seq}, scores of {LEAST_ROW} fit" if seq <= LEAST_ROW else ""


def chunked_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKV: jax.Array,
  segment_ids_BT: jax.Array,
  sinks_N: jax.Array | None,
  *,
  max_segments: int,
  window: int | None,
  soft_cap: float | None,
) -> jax.Array:
  """`ops.attention.causal.attention` of local arrays.

  A chunk sees the keys before its end, which are cut statically, and with a window no others before
  that either. The backward pass computes the scores of each chunk again.
  """
  batch, seq = segment_ids_BT.shape
  at_BT = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))

  def attend(q_BCNH, k_BSKH, v_BSKV, queries, keys, sinks_N):
    (q_ids_BC, q_at_BC), (k_ids_BS, k_at_BS) = queries, keys
    distance_BCS = q_at_BC[:, :, None] - k_at_BS[:, None, :]
    seen_BCS = (q_ids_BC[:, :, None] == k_ids_BS[:, None, :]) & (distance_BCS >= 0)
    if window is not None:
      seen_BCS &= distance_BCS < window
    y_BCNV, lse_BCN = attend_to_seen(q_BCNH, k_BSKH, v_BSKV, seen_BCS, soft_cap)
    if sinks_N is not None:  # they only enlarge the softmax's denominators
      y_BCNV *= jnp.exp(lse_BCN - jnp.logaddexp(lse_BCN, sinks_N))[..., None]
    return y_BCNV.astype(q_BCNH.dtype)

  parts = []
  for begin in range(0, seq, CHUNK):
    end = min(begin + CHUNK, seq)
    first = 0 if window is None else max(0, begin - window + 1)
    of = lambda a, first, end: jax.lax.slice_in_dim(a, first, end, axis=1)
    queries = of(segment_ids_BT, begin, end), of(at_BT, begin, end)
    keys = of(segment_ids_BT, first, end), of(at_BT, first, end)
    qkv = of(q_BTNH, begin, end), of(k_BTKH, first, end), of(v_BTKV, first, end)
    if parts:  # one chunk after the other, backward too: else the scores of several may be there
      parts[-1], qkv = jax.lax.optimization_barrier((parts[-1], qkv))
    parts.append(jax.checkpoint(attend)(*qkv, queries, keys, sinks_N))
  return checkpoint_name(jnp.concatenate(parts, axis=1), ATTENTION_RESULTS[0])


def attend_to_seen(
  q_BCNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  seen_BCS: jax.Array,
  soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
  """Attention to the keys that each query sees, one at least, and the logarithms of the softmax's
  denominators [batch, queries, heads]; both float32 or wider.
  """
  wide = jnp.promote_types(q_BCNH.dtype, jnp.float32)
  batch, queries, heads, width = q_BCNH.shape
  q_BCKGH = q_BCNH.reshape(batch, queries, k_BSKH.shape[2], -1, width)
  scores = jnp.einsum("BCKGH,BSKH->BKGCS", q_BCKGH, k_BSKH, preferred_element_type=wide)
  scores *= width**-0.5
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores_BKGCS = jnp.where(seen_BCS[:, None, None], scores, -jnp.inf)
  lse_BKGC = jax.nn.logsumexp(scores_BKGCS, axis=-1)
  weights_BKGCS = jnp.exp(scores_BKGCS - lse_BKGC[..., None]).astype(q_BCNH.dtype)
  y_BCKGV = jnp.einsum("BKGCS,BSKV->BCKGV", weights_BKGCS, v_BSKV, preferred_element_type=wide)
  by_head = batch, queries, heads
  return y_BCKGV.reshape(*by_head, -1), jnp.moveaxis(lse_BKGC, 3, 1).reshape(by_head)
