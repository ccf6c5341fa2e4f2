"""The section `model`."""

import dataclasses

from ats_jax.config.schema.rope import ROPE_SCALINGS, RopeScaling
from ats_jax.config.schema.setting import section, setting, when


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder: pre-norm, grouped-query attention, RoPE, a gated feed-forward."""

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
  activation: str = setting(
    "silu",
    "of the gate of a feed-forward: SwiGLU's, GELU by tanh (GeGLU), or SwiGLU of clamped inputs, "
    "g * sigmoid(gate_slope * g) * (u + 1)",
    choices=("silu", "gelu_tanh", "clamped"),
  )
  gate_limit: float = setting(
    7.0,
    "g is at most this, and u within it on both sides",
    low=0.01,
    needs=when("model.activation", "clamped"),
  )
  gate_slope: float = setting(
    1.702, "slope of the sigmoid", low=0.0, needs=when("model.activation", "clamped")
  )
  rope_theta: float = setting(10_000.0, "base of the rotary frequencies", low=1.0)
  rope_scaling: RopeScaling = section(ROPE_SCALINGS, "none")
  qkv_bias: bool = setting(False, "add trained vectors to queries, keys and values")
  attn_out_bias: bool = setting(False, "add a trained vector to attention's output")
  attn_sinks: bool = setting(
    False, "train a logit of each head that every query sees beside its keys, with value 0"
  )
  qk_norm: bool = setting(False, "RMS-normalise queries and keys before RoPE")
  qk_norm_scope: str = setting(
    "head",
    "what qk_norm takes together: each head, or all heads",
    choices=("head", "all"),
    needs=when("model.qk_norm"),
  )
  attn_scale: float = setting(
    0.0, "what queries' products with keys are multiplied with; 0 = head_dim^-1/2", low=0.0
  )
  kv_latent_dim: int = setting(
    0,
    "width of the latent that all heads' keys and values are made of, which a cache keeps in their "
    "place (multi-head latent attention); 0 = grouped-query attention",
    low=0,
  )
  q_latent_dim: int = setting(
    0,
    "width of the latent that queries are made of; 0 = none",
    low=0,
    needs=when("model.kv_latent_dim"),
  )
  latent_rope_dim: int = setting(
    0,
    "how many of head_dim are rotated; that part of a key is one for all heads",
    low=0,
    needs=when("model.kv_latent_dim"),
  )
  v_head_dim: int = setting(
    0, "width of the values of one head; 0 = head_dim", low=0, needs=when("model.kv_latent_dim")
  )
  attn_soft_cap: float = setting(
    0.0, "attention's scores s become cap * tanh(s / cap), without a kernel; 0 = no cap", low=0.0
  )
  window: int = setting(
    0, "tokens that a query sees, itself and those before it; 0 = all", unit="tokens", low=0
  )
  full_every: int = setting(
    0,
    "every n-th layer sees all tokens in spite of the window, the n-th first; 0 = none",
    low=0,
    needs=when("model.window"),
  )
  window_rope_theta: float = setting(
    0.0,
    "base of the rotary frequencies, unscaled, of layers with a window; 0 = as others",
    low=0.0,
    needs=when("model.window"),
  )
  tie_embeddings: bool = setting(False, "use the embedding table as the output head")
  scale_embeddings: bool = setting(False, "multiply looked-up embeddings by sqrt(d_model)")
  logit_soft_cap: float = setting(
    0.0, "the head's logits z become cap * tanh(z / cap), without a kernel; 0 = no cap", low=0.0
  )
  post_norms: bool = setting(False, "RMS-normalise the output of each sub-layer too")
  norm_plus_one: bool = setting(False, "norms multiply by 1 + weight; weights begin with 0")
  dropout: float = setting(0.0, "rate on the output of each sub-layer", low=0.0, high=0.9)
  norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", low=0.0)
  init_std: float = setting(
    0.02, "standard deviation of weights; residual outputs get it / sqrt(2 * num_layers)", low=0.0
  )
