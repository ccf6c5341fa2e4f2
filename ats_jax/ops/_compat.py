"""The only file that uses private jax names; tested on jax 0.11.2 and on the newest."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import distributed
from jax._src.cudnn import fused_attention_stablehlo as cudnn

_LAYOUT = cudnn.AttentionLayout.BTNH


def coordination_client() -> Any:
  """The client of the job's coordination service in this process; None outside a job."""
  return distributed.global_state.client


def cudnn_attention_forward(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  starts_BM: jax.Array | None,
  lengths_BM: jax.Array | None,
  scale: float,
  window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Causal cuDNN flash attention within each segment of a packed row; no dense mask.

  Args:
    q_BTNH: bfloat16 queries [batch, seq, heads, head_dim].
    k_BTKH: keys [batch, seq, kv_heads, head_dim].
    v_BTKH: values like the keys.
    starts_BM: int32 [batch, M + 1], first token of each of at most M segments, then -1. None = a
      row is one segment, for which cuDNN has a faster kernel.
    lengths_BM: int32 [batch, M], tokens in each segment, then -1; or None.
    scale: multiplies the scores.
    window: a query sees itself and the `window - 1` tokens before it; None = all before it.

  Returns:
    The output like the queries, and the logarithms of the softmax's denominators, float32
    [batch * M, heads, seq], M = 1 for None: those of the batch's first segment come first, then the
    second's... For tokens of no segment they hold anything.
  """
  results = cudnn.dot_product_attention(
    q_BTNH,
    k_BTKH,
    v_BTKH,
    q_seqlen=lengths_BM,
    kv_seqlen=lengths_BM,
    q_offsets=starts_BM,
    kv_offsets=starts_BM,
    scale=scale,
    mask_type=_mask(starts_BM),
    sliding_window_length=window,
    return_residual=True,
  )
  y_BTNH, lse_RNT, *_ = results  # no more than two without fp8
  return y_BTNH, lse_RNT


def cudnn_attention_backward(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  starts_BM: jax.Array | None,
  lengths_BM: jax.Array | None,
  y_BTNH: jax.Array,
  lse_RNT: jax.Array,
  dy_BTNH: jax.Array,
  scale: float,
  window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of queries, keys and values, from the output and the softmax statistics.

  The attention weights are `exp(score - lse)`, also for an output and statistics that
  `cudnn_attention_forward` did not return. Gradients of tokens of no segment are undefined.
  """
  none, mask = jnp.zeros(0, q_BTNH.dtype), _mask(starts_BM)
  starts, lengths = (none if a is None else a for a in (starts_BM, lengths_BM))
  newer = "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters
  dq_BTNH, dk_BTKH, dv_BTKH = cudnn._dot_product_attention_bwd_p_wrapper.bind(
    q_BTNH,
    k_BTKH,
    v_BTKH,
    none,  # bias
    lengths,
    lengths,
    starts,
    starts,
    none,  # page tables
    none,
    lse_RNT,
    y_BTNH,
    dy_BTNH,
    scale=scale,
    seed=0,
    dropout_rate=0.0,
    variadic_args=(False, False),
    mask_type=mask,
    layout=_LAYOUT.value,
    sliding_window_length=window,
    **({"score_mod": None} if newer else {}),
  )
  return dq_BTNH, dk_BTKH, dv_BTKH


def _mask(starts_BM):
  return cudnn.MaskType.CAUSAL if starts_BM is None else cudnn.MaskType.PADDING_CAUSAL
