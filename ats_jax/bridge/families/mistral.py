"""Mistral."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  MLP,
  NORMS,
  TABLES,
  HeadDim,
  KVHeads,
  Layers,
  RopeFields,
  size_fields,
)
from ats_jax.bridge.family import Family, FixedField

FAMILY = Family(
  name="Mistral",
  model_type="mistral",
  architecture="MistralForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *MLP),
  fields=(
    *size_fields(eps=1e-6),
    KVHeads(8),
    HeadDim(),
    RopeFields(),
    Layers(),
    FixedField("hidden_act", "silu"),
  ),
)
