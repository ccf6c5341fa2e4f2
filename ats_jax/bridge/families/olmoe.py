"""OLMoE: one norm over the queries of all heads, and one over the keys."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  NORMS,
  QK_NORM,
  TABLES,
  EqualHeads,
  KVHeads,
  RopeFields,
  balance_fields,
  experts,
  size_fields,
)
from ats_jax.bridge.family import TRAINING, Family, FixedField, ImpliedSettings, SettingField

FAMILY = Family(
  name="OLMoE",
  model_type="olmoe",
  architecture="OlmoeForCausalLM",
  rates=False,
  rows=(
    *(*TABLES, *NORMS, *ATTENTION, *QK_NORM),
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
  ),
  fields=(
    *size_fields(eps=1e-5),
    KVHeads(),
    EqualHeads(),
    RopeFields(),
    SettingField("num_experts", "moe.num_experts", 64),
    SettingField("num_experts_per_tok", "moe.top_k", 8),
    SettingField("intermediate_size", "moe.d_ff"),
    SettingField("norm_topk_prob", "moe.renormalize", False),
    FixedField("hidden_act", "silu"),
    FixedField("attention_bias", False),
    FixedField("clip_qkv", None),
    ImpliedSettings(
      (
        ("model.qk_norm", True),
        ("model.qk_norm_scope", "all"),
        ("moe.bias_update", "none"),
      )
    ),
  ),
  training=(*TRAINING, *balance_fields(0.01)),
)
