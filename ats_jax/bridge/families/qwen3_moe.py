"""Qwen3-MoE: narrow experts in all layers, in every n-th, or in all but the first few."""

import dataclasses

from ats_jax.bridge.families.common import (
  ATTENTION,
  MLP,
  NORMS,
  QK_NORM,
  TABLES,
  HeadDim,
  KVHeads,
  RopeFields,
  balance_fields,
  experts,
  size_fields,
)
from ats_jax.bridge.family import (
  TRAINING,
  Family,
  FixedField,
  ImpliedSettings,
  SettingField,
  Values,
)
from ats_jax.config.schema import Config


@dataclasses.dataclass(frozen=True)
class _Count:
  """How many experts: `num_experts`, or `num_local_experts` as transformers 5 writes it."""

  keys: tuple[str, ...] = ("num_experts", "num_local_experts")

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    return {"moe.num_experts": theirs.get("num_local_experts", theirs.get("num_experts", 128))}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    return {"num_experts": cfg.moe.num_experts}


@dataclasses.dataclass(frozen=True)
class _DenseFirst:
  """`mlp_only_layers`: the layers at the bottom."""

  keys: tuple[str, ...] = ("mlp_only_layers",)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    layers = theirs.get("mlp_only_layers") or []
    if layers != list(range(len(layers))) or (layers and theirs.get("decoder_sparse_step", 1) > 1):
      raise ValueError(
        f"mlp_only_layers is {layers} in config.json: here layers without experts are the first "
        "few, or all but every n-th, not both."
      )
    return {"moe.dense_first": len(layers)}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    return {"mlp_only_layers": list(range(cfg.moe.dense_first))}


FAMILY = Family(
  name="Qwen3-MoE",
  model_type="qwen3_moe",
  architecture="Qwen3MoeForCausalLM",
  rows=(
    *(*TABLES, *NORMS, *ATTENTION, *QK_NORM),
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
    *MLP,
  ),
  fields=(
    *size_fields(eps=1e-6),
    KVHeads(4),
    HeadDim(),
    RopeFields(),
    _Count(),
    _DenseFirst(),
    SettingField("num_experts_per_tok", "moe.top_k", 8),
    SettingField("moe_intermediate_size", "moe.d_ff", 768),
    SettingField("decoder_sparse_step", "moe.every", 1),
    SettingField("norm_topk_prob", "moe.renormalize", False),
    FixedField("hidden_act", "silu"),
    FixedField("attention_bias", False),
    FixedField("use_sliding_window", False),
    FixedField("sliding_window", None),
    ImpliedSettings((("model.qk_norm", True), ("moe.bias_update", "none"))),
  ),
  training=(*TRAINING, *balance_fields()),
)
