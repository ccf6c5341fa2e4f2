"""Qwen2 and 2.5: biases on queries, keys and values."""

from ats_jax.bridge.families.common import (
  ATTENTION_WITH_BIAS,
  MLP,
  NORMS,
  TABLES,
  EqualHeads,
  KVHeads,
  Layers,
  RopeFields,
  size_fields,
)
from ats_jax.bridge.family import Family, FixedField, ImpliedSettings

FAMILY = Family(
  name="Qwen2",
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION_WITH_BIAS, *MLP),
  fields=(
    *size_fields(eps=1e-6),
    KVHeads(32),
    EqualHeads(),
    RopeFields(),
    Layers(by_switch=True),
    FixedField("hidden_act", "silu"),
    ImpliedSettings((("model.qkv_bias", True),)),
  ),
)
