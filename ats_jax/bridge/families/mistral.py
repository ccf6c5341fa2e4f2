"""Mistral."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  MLP,
  NORMS,
  TABLES,
  HeadDim,
  KVHeads,
  Layers,
  Rope,
  sizes,
)
from ats_jax.bridge.family import Family, Only

FAMILY = Family(
  name="Mistral",
  model_type="mistral",
  architecture="MistralForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *MLP),
  fields=(
    *sizes(eps=1e-6),
    KVHeads(8),
    HeadDim(),
    Rope(),
    Layers(),
    Only("hidden_act", "silu"),
  ),
)
