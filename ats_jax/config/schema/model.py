"""The section `model`."""

import dataclasses

from ats_jax.config.schema.setting import setting


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder: pre-norm, grouped-query attention, RoPE, SwiGLU."""

  vocab_size: int = setting(
    0,
    "rows of the embedding; 0 = the tokenizer's size rounded up to a multiple of 128",
    low=0,
    high=2**24,
  )
  num_layers: int = setting(4, "decoder blocks", low=1, high=10_000)
  d_model: int = setting(128, "width of the residual stream", low=8, high=2**20)
  num_heads: int = setting(4, "query heads", low=1, high=2**16)
  num_kv_heads: int = setting(4, "key/value heads (GQA); divides num_heads", low=1)
  head_dim: int = setting(0, "width of one head; 0 = d_model / num_heads", low=0)
  d_ff: int = setting(
    0,
    "hidden width of SwiGLU; 0 = 8/3 * d_model rounded up to a multiple of 256",
    low=0,
    high=2**22,
  )
  rope_theta: float = setting(10_000.0, "base of the rotary frequencies", low=1.0)
  qk_norm: bool = setting(False, "RMS-normalise queries and keys per head before RoPE")
  tie_embeddings: bool = setting(False, "use the embedding table as the output head")
  dropout: float = setting(0.0, "rate on the output of each sub-layer", low=0.0, high=0.9)
  norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", low=0.0)
  init_std: float = setting(
    0.02, "standard deviation of weights; residual outputs get it / sqrt(2 * num_layers)", low=0.0
  )
