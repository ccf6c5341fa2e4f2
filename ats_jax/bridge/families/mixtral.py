"""Mixtral: experts in every layer, the weights of a token's own add up to 1."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  NORMS,
  TABLES,
  HeadDim,
  KVHeads,
  Layers,
  Rope,
  experts,
  sizes,
)
from ats_jax.bridge.family import Always, Family, Field, Only

FAMILY = Family(
  name="Mixtral",
  model_type="mixtral",
  architecture="MixtralForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")),
  fields=(
    *sizes(eps=1e-5),
    KVHeads(8),
    HeadDim(),
    Rope(1e6),
    Layers(window=0),
    Field("num_local_experts", "moe.num_experts", 8),
    Field("num_experts_per_tok", "moe.top_k", 2),
    Field("intermediate_size", "moe.d_ff"),
    Only("hidden_act", "silu"),
    Only("router_jitter_noise", 0.0),
    Always((("moe.renormalize", True), ("moe.bias_update", "none"))),
  ),
)
