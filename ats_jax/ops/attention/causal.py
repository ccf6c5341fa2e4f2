"""Causal attention over packed rows, and over a key/value cache.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head_dim.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops import registry
from ats_jax.ops.attention.along_row import AlongRow, attend_whole_rows
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.ops.remat import ATTENTION_RESULTS
from ats_jax.sharding.apply import island

Q_AXES = ("batch", "seq", "heads", "head_dim")
KV_AXES = ("batch", "seq", "kv_heads", "head_dim")
TOKEN_AXES = ("batch", "seq")
ROW_AXES = ("batch", None)  # whole rows, however others are cut


def attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  *,
  segment_ids_BT: jax.Array,
  max_segments: int,
  kernels: Kernels = XLA,
  along_row: AlongRow = attend_whole_rows,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
) -> jax.Array:
  """Causal attention within segments, scaled by head_dim^-1/2; softmax in float32.

  Args:
    q_BTNH: queries [batch, seq, heads, head_dim].
    k_BTKH: keys [batch, seq, kv_heads, head_dim]; kv_heads divides heads.
    v_BTKH: values like the keys; their width may be another, no larger one with cuDNN.
    segment_ids_BT: int32; a token sees tokens up to itself that carry its own id. Each id is one
      contiguous run.
    max_segments: runs in a row at most, padding's included.
    kernels: the chosen implementations.
    along_row: how the devices along a row share its attention.
    window: a token sees itself and the `window - 1` tokens before it; None = all before it.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv:2408.00118); not
      with cuDNN.
    sinks_N: float32 [heads], trained: the logit of a place with value 0 that every token sees
      (gpt-oss, arXiv:2508.10925).

  Returns:
    Array like the queries, as wide as the values.

  Raises:
    ValueError: a window below 1, or a soft cap that is not positive or comes with cuDNN.
  """
  if window is not None and window < 1:
    raise ValueError(f"attention: window is {window}: at least 1 is expected, or None")
  if soft_cap is not None and soft_cap <= 0:
    raise ValueError(f"attention: soft_cap is {soft_cap}: a positive number is expected, or None")
  kernel = registry.kernel("attention", "forward", kernels)

  def attend_rows(q, k, v, segments, sinks):
    if kernel is not None:
      options = {"max_segments": max_segments, "window": window, "soft_cap": soft_cap}
      return kernel(q, k, v, segments, sinks, **options)
    same_B1TT = (segments[:, :, None] == segments[:, None, :])[:, None]
    return _dense(q, k, v, same_B1TT, window, soft_cap, sinks)

  def local(q, k, v, segments, sinks=None):
    return along_row(attend_rows, q, k, v, segments, sinks)

  sinks, sinks_axes = ((), ()) if sinks_N is None else ((sinks_N,), (("heads_of_rows",),))
  return island(
    local,
    in_axes=(Q_AXES, KV_AXES, KV_AXES, ROW_AXES, *sinks_axes),
    out_axes=Q_AXES,
  )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, *sinks)


def _dense(q_BTNH, k_BTKH, v_BTKH, same_B1TT, window, soft_cap, sinks_N):
  """Attention with all scores in memory at once."""
  plain = sinks_N is None and soft_cap is None and v_BTKH.shape == k_BTKH.shape
  if plain and q_BTNH.dtype != jnp.float16:  # jax asks for an algorithm that not all devices have
    before = None if window is None else (window - 1, 0)
    y_BTNH = jax.nn.dot_product_attention(
      q_BTNH,
      k_BTKH,
      v_BTKH,
      mask=same_B1TT,
      is_causal=True,
      local_window_size=before,
      implementation="xla",
    )
    return checkpoint_name(y_BTNH, ATTENTION_RESULTS[0])
  seq = q_BTNH.shape[1]
  distance_TT = jnp.arange(seq)[:, None] - jnp.arange(seq)
  visible_B1TT = same_B1TT & (distance_TT >= 0) & (distance_TT < (window or seq))
  y_BTNH = _attention_with_options(q_BTNH, k_BTKH, v_BTKH, visible_B1TT, soft_cap, sinks_N)
  return checkpoint_name(y_BTNH, ATTENTION_RESULTS[0])


def _attention_with_options(q_BTNH, k_BSKH, v_BSKH, visible_B1TS, soft_cap, sinks_N):
  """Like `jax.nn.dot_product_attention`, with a soft cap, sinks and values of any width."""
  (batch, queries, heads, width), keys = q_BTNH.shape, k_BSKH.shape[1]
  wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
  q_BTKGH = q_BTNH.reshape(batch, queries, k_BSKH.shape[2], -1, width)
  score = _scores_of_float16 if q_BTNH.dtype == jnp.float16 else _scores
  scores_BNTS = score(q_BTKGH, k_BSKH).reshape(batch, heads, queries, keys) * width**-0.5
  if soft_cap is not None:
    scores_BNTS = soft_cap * jnp.tanh(scores_BNTS / soft_cap)
  scores_BNTS = jnp.where(visible_B1TS, scores_BNTS, -jnp.inf)
  if sinks_N is not None:
    sink_BNT1 = jnp.broadcast_to(sinks_N.astype(wide)[:, None, None], (batch, heads, queries, 1))
    scores_BNTS = jnp.concatenate([scores_BNTS, sink_BNT1], axis=-1)
  weights_BNTS = jax.nn.softmax(scores_BNTS)[..., :keys].astype(q_BTNH.dtype)
  weights = weights_BNTS.reshape(batch, k_BSKH.shape[2], -1, queries, keys)
  y_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH)
  return y_BTKGH.reshape(*q_BTNH.shape[:-1], -1)


def _scores(q_BTKGH, k_BSKH):
  wide = jnp.promote_types(q_BTKGH.dtype, jnp.float32)
  return jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)


# Its own derivative would multiply in float32, for which GPUs before sm_80 have no tensor cores.
_scores_of_float16 = jax.custom_vjp(_scores)


def _scores_backward(saved, dscores_BKGTS):
  q_BTKGH, k_BSKH = saved
  dscores_BKGTS = dscores_BKGTS.astype(q_BTKGH.dtype)
  dq_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", dscores_BKGTS, k_BSKH)
  return dq_BTKGH, jnp.einsum("BKGTS,BTKGH->BSKH", dscores_BKGTS, q_BTKGH)


_scores_of_float16.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


def largest_logit(
  q_BTNH: jax.Array, k_BTKH: jax.Array, segment_ids_BT: jax.Array, window: int | None
) -> jax.Array:
  """The largest score that `attention` has before a soft cap, float32; -inf if all is padding."""

  def local(q_BTNH, k_BTKH, segments_BT):
    batch, seq, _, width = q_BTNH.shape
    distance_TT = jnp.arange(seq)[:, None] - jnp.arange(seq)
    visible_BTT = (segments_BT[:, :, None] == segments_BT[:, None]) & (distance_TT >= 0)
    visible_BTT &= (distance_TT < (window or seq)) & (segments_BT[:, None] > 0)
    q_BTKGH = q_BTNH.reshape(batch, seq, k_BTKH.shape[2], -1, width)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BTKH, preferred_element_type=wide)
    logits = jnp.where(visible_BTT[:, None, None], logits * width**-0.5, -jnp.inf)
    return jnp.max(logits, axis=(2, 3, 4))

  whole_rows = lambda axes: (axes[0], None, *axes[2:])
  return jnp.max(
    island(
      local,
      in_axes=(whole_rows(Q_AXES), whole_rows(KV_AXES), ROW_AXES),
      out_axes=("batch", "kv_heads"),
    )(q_BTNH, k_BTKH, segment_ids_BT)
  )


def cached_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  k_cache_BSKH: jax.Array,
  v_cache_BSKH: jax.Array,
  index_BT: jax.Array,
  *,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Write new keys and values into a cache, then attend to it.

  Args:
    q_BTNH: queries of the new tokens.
    k_BTKH: keys of the new tokens.
    v_BTKH: values of the new tokens.
    k_cache_BSKH: cached keys, S slots.
    v_cache_BSKH: cached values, S slots.
    index_BT: int32 slot of each new token; a query sees the slots up to its own.
    window: a query sees the last `window` of these slots; None = all.
    soft_cap: as in `attention`.
    sinks_N: as in `attention`.

  Returns:
    The output like the queries, and the two caches with the new tokens in their slots.
  """

  def local(q, k, v, k_cache, v_cache, index, sinks=None):
    rows = jnp.arange(q.shape[0])[:, None]
    k_cache = k_cache.at[rows, index].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[rows, index].set(v.astype(v_cache.dtype))
    return attend_to_slots(q, k_cache, v_cache, index, window, soft_cap, sinks), k_cache, v_cache

  sinks, sinks_axes = ((), ()) if sinks_N is None else ((sinks_N,), (("heads",),))
  return island(
    local,
    in_axes=(Q_AXES, KV_AXES, KV_AXES, KV_AXES, KV_AXES, TOKEN_AXES, *sinks_axes),
    out_axes=(Q_AXES, KV_AXES, KV_AXES),
  )(q_BTNH, k_BTKH, v_BTKH, k_cache_BSKH, v_cache_BSKH, index_BT, *sinks)


def attend_to_slots(q_BTNH, k_BSKH, v_BSKH, index_BT, window, soft_cap, sinks_N):
  """Attention of local arrays whose query sees the slots up to its own; all scores in memory."""
  slots = jnp.arange(k_BSKH.shape[1])
  visible_B1TS = (slots <= index_BT[:, :, None])[:, None]
  if window is not None:
    visible_B1TS &= (slots > index_BT[:, :, None] - window)[:, None]
  if soft_cap is not None or sinks_N is not None or q_BTNH.dtype == jnp.float16:  # as `_dense`
    return _attention_with_options(q_BTNH, k_BSKH, v_BSKH, visible_B1TS, soft_cap, sinks_N)
  return jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, mask=visible_B1TS, implementation="xla"
  )
