"""Qwen3: norms of each head's queries and keys."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  MLP,
  NORMS,
  QK_NORM,
  TABLES,
  HeadDim,
  KVHeads,
  Layers,
  RopeFields,
  size_fields,
)
from ats_jax.bridge.family import Family, FixedField, ImpliedSettings

FAMILY = Family(
  name="Qwen3",
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *QK_NORM, *MLP),
  fields=(
    *size_fields(eps=1e-6),
    KVHeads(32),
    HeadDim(128),
    RopeFields(),
    Layers(by_switch=True),
    FixedField("hidden_act", "silu"),
    FixedField("attention_bias", False),
    ImpliedSettings((("model.qk_norm", True),)),
  ),
)
