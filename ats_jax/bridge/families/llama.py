"""Llama 2 and 3."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  MLP,
  NORMS,
  TABLES,
  HeadDim,
  KVHeads,
  Rope,
  sizes,
)
from ats_jax.bridge.family import Family, Only

FAMILY = Family(
  name="Llama",
  model_type="llama",
  architecture="LlamaForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *MLP),
  fields=(
    *sizes(eps=1e-6),
    KVHeads(),
    HeadDim(),
    Rope(),
    Only("hidden_act", "silu"),
    Only("attention_bias", False),
    Only("mlp_bias", False),
  ),
)
