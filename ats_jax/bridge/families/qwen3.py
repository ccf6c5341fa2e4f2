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
  Rope,
  sizes,
)
from ats_jax.bridge.family import Always, Family, Only

FAMILY = Family(
  name="Qwen3",
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  rows=(*TABLES, *NORMS, *ATTENTION, *QK_NORM, *MLP),
  fields=(
    *sizes(eps=1e-6),
    KVHeads(32),
    HeadDim(128),
    Rope(),
    Layers(by_switch=True),
    Only("hidden_act", "silu"),
    Only("attention_bias", False),
    Always((("model.qk_norm", True),)),
  ),
)
