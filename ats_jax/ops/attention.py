"""Causal attention over packed rows, and over a key/value cache.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head_dim, M segments.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import Config
from ats_jax.ops import _compat, registry
from ats_jax.ops.registry import Choice
from ats_jax.ops.requirements import Device
from ats_jax.sharding.apply import island

Q_AXES = ("batch", "seq", "heads", "head_dim")
KV_AXES = ("batch", "seq", "kv_heads", "head_dim")
TOKEN_AXES = ("batch", "seq")
# Names (jax.ad_checkpoint) of the output and of the softmax statistics. A policy that keeps both
# spares the backward pass a second run of attention.
SAVED_NAMES = ("attn_y", "attn_lse")


def choose(cfg: Config, platform: str, compute_capability: str = "0.0") -> Choice:
  """Decide which implementation training attention uses.

  Args:
    cfg: the run; `ops.attention` may name an implementation, `model.head_dim` is resolved.
    platform: "cpu", "gpu" or "tpu".
    compute_capability: of the GPU, e.g. "9.0".

  Raises:
    ValueError: if the implementation that was asked for cannot run here.
    FallbackError: if `ops.strict` is set and the fast implementation of a GPU cannot run.
  """
  device = Device(platform, compute_capability)
  return registry.choose_op(cfg, device, "attention")["forward"]


def attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  *,
  segment_ids_BT: jax.Array,
  max_segments: int,
  implementation: str,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
) -> jax.Array:
  """Causal attention within segments, scaled by head_dim^-1/2; softmax in float32.

  Args:
    q_BTNH: queries [batch, seq, heads, head_dim].
    k_BTKH: keys [batch, seq, kv_heads, head_dim]; kv_heads divides heads.
    v_BTKH: values like the keys.
    segment_ids_BT: int32; a token sees tokens up to itself that carry its own id. Each id is one
      contiguous run.
    max_segments: runs in a row at most, padding's included.
    implementation: "xla" (the specification) or "cudnn".
    window: a token sees itself and the `window - 1` tokens before it; None = all before it.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv:2408.00118); not
      with "cudnn".
    sinks_N: float32 [heads], trained: the logit of a place with value 0 that every token sees
      (gpt-oss, arXiv:2508.10925).

  Returns:
    Array like the queries.

  Raises:
    ValueError: a window below 1, or a soft cap that is not positive or comes with "cudnn".
  """
  if window is not None and window < 1:
    raise ValueError(f"attention: window is {window}: at least 1 is expected, or None")
  if soft_cap is not None and soft_cap <= 0:
    raise ValueError(f"attention: soft_cap is {soft_cap}: a positive number is expected, or None")
  if implementation == "cudnn" and soft_cap is not None:
    raise ValueError("attention: cuDNN has no soft_cap here. Use implementation='xla'")

  def local(q, k, v, segments, sinks=None):
    if implementation == "cudnn":
      bounds = segment_bounds(segments, max_segments)
      return _flash(q, k, v, sinks, *bounds, q.shape[-1] ** -0.5, window)
    same_B1TT = (segments[:, :, None] == segments[:, None, :])[:, None]
    return _dense(q, k, v, same_B1TT, window, soft_cap, sinks)

  sinks, sinks_axes = ((), ()) if sinks_N is None else ((sinks_N,), (("heads",),))
  return island(
    local,
    in_axes=(Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, *sinks_axes),
    out_axes=Q_AXES,
  )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, *sinks)


def _dense(q_BTNH, k_BTKH, v_BTKH, same_B1TT, window, soft_cap, sinks_N):
  """All scores at once."""
  if sinks_N is None and soft_cap is None:
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
    return checkpoint_name(y_BTNH, SAVED_NAMES[0])
  batch, seq, heads, width = q_BTNH.shape
  wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
  q_BTKGH = q_BTNH.reshape(batch, seq, k_BTKH.shape[2], -1, width)
  scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BTKH, preferred_element_type=wide)
  scores_BNTS = scores.reshape(batch, heads, seq, seq) * width**-0.5
  if soft_cap is not None:
    scores_BNTS = soft_cap * jnp.tanh(scores_BNTS / soft_cap)
  distance_TT = jnp.arange(seq)[:, None] - jnp.arange(seq)
  visible_B1TT = same_B1TT & (distance_TT >= 0) & (distance_TT < (window or seq))
  scores_BNTS = jnp.where(visible_B1TT, scores_BNTS, -jnp.inf)
  if sinks_N is not None:
    sink_BNT1 = jnp.broadcast_to(sinks_N.astype(wide)[:, None, None], (batch, heads, seq, 1))
    scores_BNTS = jnp.concatenate([scores_BNTS, sink_BNT1], axis=-1)
  weights_BNTS = jax.nn.softmax(scores_BNTS)[..., :seq].astype(q_BTNH.dtype)
  weights = weights_BNTS.reshape(batch, k_BTKH.shape[2], -1, seq, seq)
  y_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BTKH)
  return checkpoint_name(y_BTKGH.reshape(q_BTNH.shape), SAVED_NAMES[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _flash(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, scale, window):
  return _flash_forward(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, scale, window)[0]


def _flash_forward(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, scale, window):
  """The kernel, then the sinks, which only enlarge the softmax's denominators.

  What the backward pass needs has names, so that a remat policy can keep it.
  """
  y_BTNH, lse_RNT = _compat.cudnn_attention(
    q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM, scale, window
  )
  if sinks_N is not None:
    without_RNT, lse_RNT = lse_RNT, jnp.logaddexp(lse_RNT, sinks_N[:, None])
    share_BTN = by_token(jnp.exp(without_RNT - lse_RNT), starts_BM)
    y_BTNH = (y_BTNH * share_BTN[..., None]).astype(y_BTNH.dtype)
  y_BTNH = checkpoint_name(y_BTNH, SAVED_NAMES[0])
  lse_RNT = checkpoint_name(lse_RNT, SAVED_NAMES[1])
  return y_BTNH, (q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, y_BTNH, lse_RNT)


def _flash_backward(scale, window, saved, dy_BTNH):
  """The kernel's own backward pass: it takes the weights to be `exp(score - lse)`."""
  q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, y_BTNH, lse_RNT = saved
  gradients = _compat.cudnn_attention_backward(
    q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM, y_BTNH, lse_RNT, dy_BTNH, scale, window
  )
  dsinks_N = None
  if sinks_N is not None:  # its weight times (0 - y) . dy
    weight_BTN = by_token(jnp.exp(sinks_N[:, None] - lse_RNT), starts_BM)
    product_BTN = jnp.einsum("BTNH,BTNH->BTN", y_BTNH, dy_BTNH, preferred_element_type=jnp.float32)
    dsinks_N = -jnp.sum(weight_BTN * product_BTN, axis=(0, 1)).astype(sinks_N.dtype)
  return *gradients, dsinks_N, None, None


_flash.defvjp(_flash_forward, _flash_backward)


def by_token(values_RNT: jax.Array, starts_BM: jax.Array) -> jax.Array:
  """Put what a kernel keeps by segment, its statistics, into the order of the tokens.

  Args:
    values_RNT: [segments of the batch or more, heads, seq]; a segment's tokens come first in a row.
    starts_BM: as `segment_bounds` returns them.

  Returns:
    [batch, seq, heads].
  """
  token_T = jnp.arange(values_RNT.shape[-1])
  is_start_BM = starts_BM >= 0
  reached_BMT = is_start_BM[..., None] & (starts_BM[..., None] <= token_T)
  segment_BT = jnp.sum(reached_BMT, axis=1) - 1
  start_BT = jnp.take_along_axis(starts_BM, segment_BT, axis=1)
  count_B = jnp.sum(is_start_BM, axis=1)
  row_BT = segment_BT + (jnp.cumsum(count_B) - count_B)[:, None]
  of_head = lambda values_RT: values_RT[row_BT, token_T - start_BT]
  return jax.vmap(of_head, in_axes=1, out_axes=2)(values_RNT)


def segment_bounds(segment_ids_BT: jax.Array, max_segments: int) -> tuple[jax.Array, jax.Array]:
  """Find where each segment starts and how long it is.

  Args:
    segment_ids_BT: int32 [batch, seq], one contiguous run for each id.
    max_segments: M, runs in a row at most. More than that would be a wrong result, so the data
      pipeline never emits them (`data.max_segments`).

  Returns:
    Starts [batch, M + 1] and lengths [batch, M], int32, filled with -1 after the last segment.
  """
  batch, seq = segment_ids_BT.shape
  changed = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  is_start = jnp.concatenate([jnp.ones((batch, 1), bool), changed], axis=1)
  find = lambda row: jnp.nonzero(row, size=max_segments + 1, fill_value=seq)[0].astype(jnp.int32)
  bounds_BM = jax.vmap(find)(is_start)
  lengths_BM = bounds_BM[:, 1:] - bounds_BM[:, :-1]
  return (
    jnp.where(bounds_BM < seq, bounds_BM, -1),
    jnp.where(lengths_BM > 0, lengths_BM, -1),
  )


def cached_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  k_cache_BSKH: jax.Array,
  v_cache_BSKH: jax.Array,
  index_BT: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Write new keys and values into a cache, then attend to it.

  Args:
    q_BTNH: queries of the new tokens.
    k_BTKH: keys of the new tokens.
    v_BTKH: values of the new tokens.
    k_cache_BSKH: keys so far, S slots.
    v_cache_BSKH: values so far.
    index_BT: int32 slot of each new token; a query sees the slots up to its own.

  Returns:
    The output like the queries, and the two caches with the new tokens in their slots.
  """

  def local(q, k, v, k_cache, v_cache, index):
    rows = jnp.arange(q.shape[0])[:, None]
    k_cache = k_cache.at[rows, index].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[rows, index].set(v.astype(v_cache.dtype))
    visible_B1TS = (jnp.arange(k_cache.shape[1]) <= index[:, :, None])[:, None]
    y = jax.nn.dot_product_attention(q, k_cache, v_cache, mask=visible_B1TS, implementation="xla")
    return y, k_cache, v_cache

  return island(
    local,
    in_axes=(Q_AXES, KV_AXES, KV_AXES, KV_AXES, KV_AXES, TOKEN_AXES),
    out_axes=(Q_AXES, KV_AXES, KV_AXES),
  )(q_BTNH, k_BTKH, v_BTKH, k_cache_BSKH, v_cache_BSKH, index_BT)
