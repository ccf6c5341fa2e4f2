"""Llama 2 and 3."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  MLP,
  NORMS,
  TABLES,
  HeadDim,
  KVHeads,
  RopeFields,
  size_fields,
)
from ats_jax.bridge.family import Family, FixedField

FAMILY = Family(
  name="Llama",
  model_type="llama",
  architecture="LlamaForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *MLP),
  fields=(
    *size_fields(eps=1e-6),
    KVHeads(),
    HeadDim(),
    RopeFields(),
    FixedField("hidden_act", "silu"),
    FixedField("attention_bias", False),
    FixedField("mlp_bias", False),
  ),
)
