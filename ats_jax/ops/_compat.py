"""The only file that uses private jax names; tested on jax 0.11.2 and on the newest."""

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn


def cudnn_packed_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  starts_BM: jax.Array,
  lengths_BM: jax.Array,
  scale: float,
) -> jax.Array:
  """Causal cuDNN flash attention within each segment of a packed row; no dense mask.

  Args:
    q_BTNH: bfloat16 queries [batch, seq, heads, head_dim].
    k_BSKH: keys [batch, seq, kv_heads, head_dim].
    v_BSKH: values like the keys.
    starts_BM: int32 [batch, max_segments + 1], first token of each segment, then -1.
    lengths_BM: int32 [batch, max_segments], tokens in each segment, then -1.
    scale: multiplies the scores.
  """
  output = cudnn.dot_product_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    q_seqlen=lengths_BM,
    kv_seqlen=lengths_BM,
    q_offsets=starts_BM,
    kv_offsets=starts_BM,
    scale=scale,
    mask_type=cudnn.MaskType.PADDING_CAUSAL,
  )
  assert isinstance(output, jax.Array)  # a tuple only with fp8 or residuals
  return output
