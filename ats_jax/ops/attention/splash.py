"""Causal attention over packed rows on a TPU, by the splash attention kernel that JAX comes with.

Letters: B batch, T queries and keys, N query heads, K key/value heads, H head_dim, V width of a
value.
"""

import jax
import jax.numpy as jnp

from ats_jax.ops.remat import ATTENTION_RESULTS

BLOCKS = (512, 256, 128)  # queries and keys of a tile: the first of which a row is a multiple
LEAST = BLOCKS[-1]  # to a multiple of which rows are filled up, such as those of a short prompt


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
  """`ops.attention.causal.attention` of local arrays."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # here: for TPUs alone

  length, heads, width = q_BTNH.shape[1:]
  seq = -(-length // LEAST) * LEAST
  square = seq, seq
  mask = splash.CausalMask(square)
  if window is not None:
    mask = splash.LocalMask(square, (window - 1, 0), offset=0)
  block = next(size for size in BLOCKS if seq % size == 0)
  forward = "block_q", "block_kv", "block_kv_compute"
  backward = "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"
  attend = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(**dict.fromkeys((*forward, *backward), block)),
    attn_logits_soft_cap=soft_cap,
    # Both results have one name. A remat policy keeps whatever has one of the names.
    residual_checkpoint_name=ATTENTION_RESULTS[0],
  )
  sinks = None if sinks_N is None else sinks_N.astype(jnp.float32)

  def attend_row(q_NTH, k_KTH, v_KTV, segment_ids_T):
    several = max_segments > 1
    ids = splash.SegmentIds(segment_ids_T, segment_ids_T) if several else None
    y_NTV = attend(q_NTH, k_KTH, v_KTV, ids, sinks)
    assert isinstance(y_NTV, jax.Array)  # not residuals beside it, which nobody asked for
    return y_NTV

  scaled_BTNH = (q_BTNH.astype(jnp.float32) * width**-0.5).astype(q_BTNH.dtype)
  # No token sees what stands behind it, so what is filled in changes no result that is kept.
  filled = lambda x: jnp.pad(x, [(0, 0), (0, seq - length)] + [(0, 0)] * (x.ndim - 2))
  by_head = lambda x: jnp.swapaxes(filled(x), 1, 2)
  y_BNTV = jax.vmap(attend_row)(
    by_head(scaled_BTNH), by_head(k_BTKH), by_head(v_BTKV), filled(segment_ids_BT)
  )
  return jnp.swapaxes(y_BNTV, 1, 2)[:, :length].astype(q_BTNH.dtype)
