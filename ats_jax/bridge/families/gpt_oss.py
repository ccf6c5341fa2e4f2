"""GPT-OSS: sinks, every second window, biases throughout, experts in one tensor, maybe in MXFP4."""

from ats_jax.bridge import mxfp4
from ats_jax.bridge.families.common import (
  BALANCE,
  NORMS,
  QKV_WITH_BIAS,
  TABLES,
  THEIRS,
  HeadDim,
  KVHeads,
  L,
  Layers,
  RopeFields,
  balance_fields,
  size_fields,
)
from ats_jax.bridge.family import (
  TRAINING,
  Family,
  FixedField,
  ImpliedSettings,
  SettingField,
  WeightRow,
)
from ats_jax.bridge.transforms import SAME, TRANSPOSED, TRANSPOSED_2, Interleaved

_MLP, _EXPERTS = f"{L}/mlp", f"{THEIRS}.mlp.experts"
_GATE_UP = (("gate", Interleaved(0)), ("up", Interleaved(1)))
_YARN = (
  ("rope_type", "yarn"),
  ("factor", 32.0),
  ("beta_fast", 32.0),
  ("beta_slow", 1.0),
  ("truncate", False),
  ("original_max_position_embeddings", 4096),
)

FAMILY = Family(
  name="GPT-OSS",
  model_type="gpt_oss",
  architecture="GptOssForCausalLM",
  rows=(
    *(*TABLES, *NORMS, *QKV_WITH_BIAS),
    WeightRow(f"{L}/attn/out/weight", f"{THEIRS}.self_attn.o_proj.weight", TRANSPOSED_2),
    WeightRow(f"{L}/attn/out/bias", f"{THEIRS}.self_attn.o_proj.bias", SAME),
    WeightRow(f"{L}/attn/sinks", f"{THEIRS}.self_attn.sinks", SAME),
    WeightRow(f"{_MLP}/router/weight", f"{THEIRS}.mlp.router.weight", TRANSPOSED),
    WeightRow(f"{_MLP}/router/offset", f"{THEIRS}.mlp.router.bias", SAME),
    *(
      WeightRow(f"{_MLP}/{p}/weight", f"{_EXPERTS}.gate_up_proj", columns)
      for p, columns in _GATE_UP
    ),
    *(
      WeightRow(f"{_MLP}/{p}/bias", f"{_EXPERTS}.gate_up_proj_bias", columns)
      for p, columns in _GATE_UP
    ),
    WeightRow(f"{_MLP}/down/weight", f"{_EXPERTS}.down_proj", SAME),
    WeightRow(f"{_MLP}/down/bias", f"{_EXPERTS}.down_proj_bias", SAME),
    *BALANCE,
  ),
  fields=(
    *size_fields(eps=1e-5),
    KVHeads(8),
    HeadDim(64),
    RopeFields(150_000.0, _YARN),
    Layers(window=128, full_every=2),
    SettingField("num_local_experts", "moe.num_experts", 128),
    SettingField("num_experts_per_tok", "moe.top_k", 4),
    SettingField("intermediate_size", "moe.d_ff"),
    SettingField("swiglu_limit", "model.gate_limit", 7.0),
    SettingField("swiglu_alpha", "model.gate_slope", 1.702),
    FixedField("attention_bias", True, (("model.qkv_bias", True), ("model.attn_out_bias", True))),
    FixedField("hidden_act", "silu", (("model.activation", "clamped"),)),
    mxfp4.Quantised(),
    ImpliedSettings(
      (
        ("model.attn_sinks", True),
        ("moe.router_bias", True),
        ("moe.expert_bias", True),
        ("moe.renormalize", True),
        ("moe.bias_update", "none"),
      )
    ),
    # Copies of other fields in the published files, which nothing reads.
    ImpliedSettings((), ("experts_per_token", "initial_context_length")),
  ),
  training=(*TRAINING, *balance_fields()),
)
