"""Causal attention over packed rows by cuDNN, with sinks.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head_dim, M segments.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops import _compat
from ats_jax.ops.remat import ATTENTION_RESULTS


def flash_attention(
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
  """`ops.attention.causal.attention` of local arrays in bfloat16; values no wider than keys.

  Raises:
    ValueError: a soft cap.
  """
  if soft_cap is not None:
    raise ValueError("attention: cudnn has no soft_cap. Use ops.kernels=attention=xla")
  starts_BM, lengths_BM = segment_bounds(segment_ids_BT, max_segments)
  how = q_BTNH.shape[-1] ** -0.5, window, max_segments == 1
  v_BTKH = _pad_width(v_BTKV, q_BTNH.shape[-1])
  y_BTNH = _flash(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, *how)
  return y_BTNH[..., : v_BTKV.shape[-1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _flash(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, scale, window, is_one):
  how = scale, window, is_one
  return _flash_forward(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, *how)[0]


def _flash_forward(q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, scale, window, is_one):
  """The kernel, then the sinks, which only enlarge the softmax's denominators.

  What the backward pass needs has names, so that a remat policy can keep it.
  """
  bounds = (None, None) if is_one else (starts_BM, lengths_BM)
  y_BTNH, lse_RNT = _compat.cudnn_attention_forward(q_BTNH, k_BTKH, v_BTKH, *bounds, scale, window)
  if sinks_N is not None:
    without_RNT, lse_RNT = lse_RNT, jnp.logaddexp(lse_RNT, sinks_N[:, None])
    share_BTN = by_token(jnp.exp(without_RNT - lse_RNT), starts_BM)
    y_BTNH = (y_BTNH * share_BTN[..., None]).astype(y_BTNH.dtype)
  y_BTNH = checkpoint_name(y_BTNH, ATTENTION_RESULTS[0])
  lse_RNT = checkpoint_name(lse_RNT, ATTENTION_RESULTS[1])
  return y_BTNH, (q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, y_BTNH, lse_RNT)


def _flash_backward(scale, window, is_one, saved, dy_BTNH):
  """The kernel's own backward pass: it takes the weights to be `exp(score - lse)`."""
  q_BTNH, k_BTKH, v_BTKH, sinks_N, starts_BM, lengths_BM, y_BTNH, lse_RNT = saved
  bounds = (None, None) if is_one else (starts_BM, lengths_BM)
  gradients = _compat.cudnn_attention_backward(
    q_BTNH, k_BTKH, v_BTKH, *bounds, y_BTNH, lse_RNT, dy_BTNH, scale, window
  )
  dsinks_N = None
  if sinks_N is not None:  # its weight times (0 - y) . dy
    weight_BTN = by_token(jnp.exp(sinks_N[:, None] - lse_RNT), starts_BM)
    product_BTN = jnp.einsum("BTNH,BTNH->BTN", y_BTNH, dy_BTNH, preferred_element_type=jnp.float32)
    dsinks_N = -jnp.sum(weight_BTN * product_BTN, axis=(0, 1)).astype(sinks_N.dtype)
  return *gradients, dsinks_N, None, None


_flash.defvjp(_flash_forward, _flash_backward)


def _pad_width(x_BTNV: jax.Array, width: int) -> jax.Array:
  narrower = width - x_BTNV.shape[-1]
  return jnp.pad(x_BTNV, ((0, 0), (0, 0), (0, 0), (0, narrower))) if narrower else x_BTNV


def by_token(values_RNT: jax.Array, starts_BM: jax.Array) -> jax.Array:
  """Reorder statistics from segments, as kernels return them, to tokens.

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
