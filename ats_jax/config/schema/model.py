"""The section `model`."""

import dataclasses
from typing import Any

from ats_jax.config.schema import rules
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
  dropout: float = setting(
    0.0, "rate on the output of each sub-layer", low=0.0, high=0.9, training=True
  )
  norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", low=0.0)
  init_std: float = setting(
    0.02,
    "standard deviation of weights; residual outputs get it / sqrt(2 * num_layers)",
    low=0.0,
    training=True,
  )
  embed_std: float = setting(
    0.0, "standard deviation of the embedding table; 0 = init_std", low=0.0, training=True
  )
  head_std: float = setting(
    0.0,
    "standard deviation of the output head, and of an embedding table that is the head too; 0 = "
    "init_std, but at most 0.25 / sqrt(d_model)",
    low=0.0,
    training=True,
  )

  @property
  def head_width(self) -> int:
    """`head_dim`, or what its 0 stands for."""
    return self.head_dim or self.d_model // self.num_heads

  def check(self, cfg: Any) -> None:
    """Refuse heads that do not share widths, and layers that none of this can be."""
    advice = "Each key/value head serves the same number of query heads; use a divisor."
    rules.divides(cfg, "model.num_kv_heads", "model.num_heads", advice)
    if not self.head_dim:
      advice = "Change one of them, or set model.head_dim."
      rules.divides(cfg, "model.num_heads", "model.d_model", advice)
    if self.kv_latent_dim:
      self._check_latents()
    elif self.head_width % 2:
      raise ValueError(
        f"the head dimension is {self.head_width}: RoPE needs pairs. Make model.head_dim even."
      )
    self._check_windows(cfg)
    if self.qk_norm_scope == "all" and cfg.mesh.tensor > 1:
      raise ValueError(
        f"model.qk_norm_scope=all takes all heads together; mesh.tensor={cfg.mesh.tensor} splits "
        "them. Use mesh.tensor=1."
      )

  def _check_latents(self) -> None:
    if not 0 < self.latent_rope_dim < self.head_width or self.latent_rope_dim % 2:
      raise ValueError(
        f"model.latent_rope_dim={self.latent_rope_dim} of a head dimension of {self.head_width}: "
        "an even number is rotated, and not all."
      )
    if self.num_kv_heads != self.num_heads:
      raise ValueError(
        f"model.num_kv_heads={self.num_kv_heads} with model.kv_latent_dim={self.kv_latent_dim}: "
        f"each of model.num_heads={self.num_heads} has its own keys there. Set both alike."
      )
    for name in ("qkv_bias", "attn_out_bias", "attn_sinks", "qk_norm", "attn_soft_cap", "window"):
      if getattr(self, name):
        raise ValueError(
          f"model.{name}={getattr(self, name)} with model.kv_latent_dim={self.kv_latent_dim}: "
          "latent attention has none. Set one of them to nothing."
        )

  def _check_windows(self, cfg: Any) -> None:
    if self.full_every == 1:
      raise ValueError("model.full_every=1 leaves no layer with a window. Set model.window=0.")
    if self.window_rope_theta and self.window_rope_theta < 1.0:
      raise ValueError(
        f"model.window_rope_theta={self.window_rope_theta} is below 1. Use 0 or 1e4."
      )
    if self.window and cfg.mod.routing != "none":
      raise ValueError(
        f"model.window={self.window} with mod.routing={cfg.mod.routing}: in a layer that skips "
        "tokens a window would count others. Set one of them to none."
      )
