"""Mixtral: experts in every layer, the weights of a token's own add up to 1."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  NORMS,
  TABLES,
  HeadDim,
  KVHeads,
  Layers,
  RopeFields,
  balance_fields,
  experts,
  size_fields,
)
from ats_jax.bridge.family import TRAINING, Family, FixedField, ImpliedSettings, SettingField

FAMILY = Family(
  name="Mixtral",
  model_type="mixtral",
  architecture="MixtralForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")),
  fields=(
    *size_fields(eps=1e-5),
    KVHeads(8),
    HeadDim(),
    RopeFields(1e6),
    Layers(window=0, keys=("sliding_window",)),
    SettingField("num_local_experts", "moe.num_experts", 8),
    SettingField("num_experts_per_tok", "moe.top_k", 2),
    SettingField("intermediate_size", "moe.d_ff"),
    FixedField("hidden_act", "silu"),
    FixedField("router_jitter_noise", 0.0),
    ImpliedSettings((("moe.renormalize", True), ("moe.bias_update", "none"))),
  ),
  training=(*TRAINING, *balance_fields()),
)
