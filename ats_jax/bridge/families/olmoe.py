"""OLMoE: one norm over the queries of all heads, and one over the keys."""

from ats_jax.bridge.families.common import (
  ATTENTION,
  NORMS,
  QK_NORM,
  TABLES,
  EqualHeads,
  KVHeads,
  Rope,
  experts,
  sizes,
)
from ats_jax.bridge.family import Always, Family, Field, Only

FAMILY = Family(
  name="OLMoE",
  model_type="olmoe",
  architecture="OlmoeForCausalLM",
  rows=(
    *(*TABLES, *NORMS, *ATTENTION, *QK_NORM),
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
  ),
  fields=(
    *sizes(eps=1e-5),
    KVHeads(),
    EqualHeads(),
    Rope(),
    Field("num_experts", "moe.num_experts", 64),
    Field("num_experts_per_tok", "moe.top_k", 8),
    Field("intermediate_size", "moe.d_ff"),
    Field("norm_topk_prob", "moe.renormalize", False),
    Only("hidden_act", "silu"),
    Only("attention_bias", False),
    Only("clip_qkv", None),
    Always(
      (
        ("model.qk_norm", True),
        ("model.qk_norm_scope", "all"),
        ("moe.bias_update", "none"),
      )
    ),
  ),
)
