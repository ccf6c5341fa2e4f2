"""Gemma 2: norms before and after each sub-layer, capped scores and logits, every second window."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  FOUR_NORMS,
  MLP,
  TIED_TABLES,
  HeadDim,
  KVHeads,
  Layers,
  QueryScale,
  RopeFields,
  gemma_fields,
  size_fields,
)
from ats_jax.bridge.family import Family, ImpliedSettings, SettingField

FAMILY = Family(
  name="Gemma 2",
  model_type="gemma2",
  architecture="Gemma2ForCausalLM",
  rows=(*TIED_TABLES, *FOUR_NORMS, *ATTENTION, *MLP),
  fields=(
    *size_fields(eps=1e-6, only_tied=True),
    KVHeads(4),
    HeadDim(256),
    RopeFields(),
    Layers(full_every=2),
    QueryScale(),
    SettingField("attn_logit_softcapping", "model.attn_soft_cap", 50.0, null=0.0),
    SettingField("final_logit_softcapping", "model.logit_soft_cap", 30.0, null=0.0),
    *gemma_fields(),
    ImpliedSettings((), ("sliding_window_size",)),  # a copy of sliding_window, which nothing reads
  ),
)
