"""Gemma 1, of which the config can be read; its weights cannot."""

from ats_jax.bridge.families.common import (
  HeadDim,
  KVHeads,
  RopeFields,
  gemma_fields,
  size_fields,
)
from ats_jax.bridge.family import Family, ImpliedSettings

FAMILY = Family(
  name="Gemma",
  model_type="gemma",
  architecture="GemmaForCausalLM",
  rows=(),
  fields=(
    *size_fields(eps=1e-6, tied=True),
    KVHeads(16),
    HeadDim(256),
    RopeFields(),
    *gemma_fields(),
    ImpliedSettings((("model.post_norms", False),)),
  ),
)
