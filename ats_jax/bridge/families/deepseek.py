"""DeepSeek-V2 and V3: latent attention, narrow experts beside shared ones, groups of experts."""

import dataclasses
import math
from typing import Any

from ats_jax.bridge.families.common import (
  MLP,
  NORMS,
  OUT,
  SHARED_EXPERTS,
  TABLES,
  THEIRS,
  L,
  RopeFields,
  experts,
  size_fields,
)
from ats_jax.bridge.family import (
  TRAINING,
  Family,
  FieldRow,
  FixedField,
  ImpliedSettings,
  SettingField,
  Values,
  WeightRow,
)
from ats_jax.bridge.transforms import SAME, TRANSPOSED, RopeHalves
from ats_jax.config.schema import Config
from ats_jax.config.schema.rope import Yarn

_ATTN = f"{THEIRS}.self_attn"
ROWS = (
  *(*TABLES, *NORMS, *MLP, OUT),
  WeightRow(f"{L}/attn/q_down", f"{_ATTN}.q_a_proj.weight", TRANSPOSED),
  WeightRow(f"{L}/attn/q_norm/scale", f"{_ATTN}.q_a_layernorm.weight", SAME),
  WeightRow(f"{L}/attn/kv_norm/scale", f"{_ATTN}.kv_a_layernorm.weight", SAME),
  WeightRow(f"{L}/attn/kv", f"{_ATTN}.kv_b_proj.weight", TRANSPOSED),
  *SHARED_EXPERTS,
)


def rotated(settings: Values) -> tuple[WeightRow, ...]:
  """Rows of the matrices whose last columns become rotated pairs."""
  halves = RopeHalves(settings["model.latent_rope_dim"])
  queries = "q_b_proj" if settings["model.q_latent_dim"] else "q_proj"
  return (
    WeightRow(f"{L}/attn/q", f"{_ATTN}.{queries}.weight", halves),
    WeightRow(f"{L}/attn/kv_down", f"{_ATTN}.kv_a_proj_with_mqa.weight", halves),
  )


def next_tokens(theirs: Values) -> str:
  """Pattern of the tensors of layers behind the last, which predict further tokens."""
  last = theirs["num_hidden_layers"] - 1
  more = theirs.get("num_nextn_predict_layers", theirs.get("num_mtp_layers")) or 0
  numbers = "|".join(str(last + i) for i in range(1, more + 1))
  return rf"model\.layers\.({numbers})\..*" if numbers else ""


@dataclasses.dataclass(frozen=True)
class _KeyWidths:
  """`qk_nope_head_dim`, and what follows from it: a key is that and the rotated part."""

  keys: tuple[str, ...] = ("qk_nope_head_dim", "qk_head_dim", "head_dim", "num_key_value_heads")

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    if theirs.get("kv_lora_rank") == 0:  # as of a model of ours without latents
      raise ValueError("kv_lora_rank is 0 in config.json: keys and values are made of latents.")
    part, heads = theirs.get("qk_rope_head_dim", 64), theirs["num_attention_heads"]
    width = theirs.get("qk_nope_head_dim", 128) + part
    follows = {"qk_head_dim": width, "head_dim": part, "num_key_value_heads": heads}
    for key, value in follows.items():
      if theirs.get(key) not in (None, value):
        raise ValueError(f"{key} is {theirs[key]!r} in config.json; {value} follows from the rest.")
    return {"model.head_dim": width, "model.num_kv_heads": heads}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    m = cfg.model
    fixed = m.head_dim - m.latent_rope_dim
    return {"qk_nope_head_dim": fixed, "num_key_value_heads": m.num_kv_heads}


@dataclasses.dataclass(frozen=True)
class _Yarn(RopeFields):
  """`RopeFields` whose `mscale_all_dim` of YaRN scales all scores, also of parts not rotated."""

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    settings = dict(super().read(theirs))
    fields = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if settings["model.rope_scaling.name"] == "yarn" and (scale := fields.get("mscale_all_dim")):
      width = theirs.get("qk_nope_head_dim", 128) + theirs.get("qk_rope_head_dim", 64)
      stretch = 0.1 * scale * math.log(settings["model.rope_scaling.factor"]) + 1.0
      settings["model.attn_scale"] = width**-0.5 * stretch * stretch
    return settings

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    m, fields = cfg.model, dict(super().write(cfg))
    yarn = m.rope_scaling
    if not isinstance(yarn, Yarn) or not m.attn_scale or yarn.factor <= 1.0:
      return fields
    stretch, unit = math.sqrt(m.attn_scale * math.sqrt(m.head_dim)), 0.1 * math.log(yarn.factor)
    # To six digits: a quotient of rounded numbers is again the number that was read.
    scales: dict[str, Any] = {"mscale_all_dim": round((stretch - 1) / unit, 6)}
    if yarn.concentration:
      scales["mscale"] = round((yarn.concentration * stretch - 1) / unit, 6)
    for key in ("rope_parameters", "rope_scaling"):
      fields[key] = {k: v for k, v in fields[key].items() if k != "attention_factor"} | scales
    return fields


@dataclasses.dataclass(frozen=True)
class _Groups:
  """`topk_method` of V2: with groups or without."""

  keys: tuple[str, ...] = ("topk_method", "n_group", "topk_group")

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    method = theirs.get("topk_method", "greedy")
    groups = {
      "greedy": lambda: (1, 1),
      "group_limited_greedy": lambda: (theirs["n_group"], theirs["topk_group"]),
    }
    if method not in groups:
      raise ValueError(
        f"topk_method is {method!r} in config.json, and this program has {', '.join(groups)}."
      )
    number, most = groups[method]()
    if number == 1:
      return {"moe.num_groups": 1}
    return {"moe.num_groups": number, "moe.top_groups": most, "moe.group_score": "max"}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    if cfg.moe.num_groups == 1:
      return {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return {
      "topk_method": "group_limited_greedy",
      "n_group": cfg.moe.num_groups,
      "topk_group": cfg.moe.top_groups,
    }


@dataclasses.dataclass(frozen=True)
class Beside:
  """What changes no setting: layers kept aside, the format of the files, code in the folder."""

  keys: tuple[str, ...] = ("num_mtp_layers", "quantization_config", "auto_map")

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    del theirs
    return {}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    del cfg
    return {"num_nextn_predict_layers": 0}


@dataclasses.dataclass(frozen=True)
class _Balance:
  """`aux_loss_alpha`, the weight of the balance loss: of each row, or of the whole batch."""

  keys: tuple[str, ...] = ("aux_loss_alpha", "seq_aux")

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    by_row = theirs.get("seq_aux") in (None, True)
    loss = "moe.sequence_aux_loss" if by_row else "moe.aux_loss"
    weight = SettingField("aux_loss_alpha", loss, 0.001, null=0.001).read(theirs)
    return {"moe.aux_loss": 0.0, **weight}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    del cfg
    return {}


NO_FURTHER_TOKENS = FixedField(
  "num_nextn_predict_layers", 0, lack="no layers here predict further tokens"
)
OF_TRAINING: tuple[FieldRow, ...] = (
  *TRAINING,
  _Balance(),
  NO_FURTHER_TOKENS,
)
SHARED: tuple[FieldRow, ...] = (
  *size_fields(eps=1e-6),
  SettingField("kv_lora_rank", "model.kv_latent_dim", 512),
  SettingField("q_lora_rank", "model.q_latent_dim", 1536, null=0),
  SettingField("qk_rope_head_dim", "model.latent_rope_dim", 64),
  SettingField("v_head_dim", "model.v_head_dim", 128),
  _KeyWidths(),
  _Yarn(),
  FixedField("hidden_act", "silu"),
  FixedField("attention_bias", False),
  FixedField("moe_layer_freq", 1),
  Beside(),
)
V2 = Family(
  name="DeepSeek-V2",
  model_type="deepseek_v2",
  architecture="DeepseekV2ForCausalLM",
  rows=(*experts("mlp", "gate_proj", "up_proj", "down_proj"), *ROWS),
  fitted_rows=rotated,
  aside=next_tokens,
  training=OF_TRAINING,
  fields=(
    *SHARED,
    _Groups(),
    SettingField("n_routed_experts", "moe.num_experts", 64),
    SettingField("num_experts_per_tok", "moe.top_k"),
    SettingField("moe_intermediate_size", "moe.d_ff", 1407),
    SettingField("n_shared_experts", "moe.num_shared", 2),
    SettingField("routed_scaling_factor", "moe.route_scale", 1.0),
    SettingField("first_k_dense_replace", "moe.dense_first", 0),
    FixedField("norm_topk_prob", False, (("moe.renormalize", False),)),
    FixedField("scoring_func", "softmax"),
    FixedField("mlp_bias", False),
    ImpliedSettings((("moe.bias_update", "none"),)),
  ),
)
V3 = Family(
  name="DeepSeek-V3",
  model_type="deepseek_v3",
  architecture="DeepseekV3ForCausalLM",
  rows=(
    *experts("mlp", "gate_proj", "up_proj", "down_proj", bias="e_score_correction_bias"),
    *ROWS,
  ),
  fitted_rows=rotated,
  aside=next_tokens,
  training=OF_TRAINING,
  fields=(
    *SHARED,
    SettingField("n_group", "moe.num_groups", 8),
    SettingField("topk_group", "moe.top_groups", 4),
    SettingField("n_routed_experts", "moe.num_experts", 256),
    SettingField("num_experts_per_tok", "moe.top_k", 8),
    SettingField("moe_intermediate_size", "moe.d_ff", 2048),
    SettingField("n_shared_experts", "moe.num_shared", 1),
    SettingField("routed_scaling_factor", "moe.route_scale", 2.5),
    SettingField("first_k_dense_replace", "moe.dense_first", 3),
    SettingField("norm_topk_prob", "moe.renormalize", True),
    FixedField("scoring_func", "sigmoid", (("moe.score", "sigmoid"),)),
    FixedField("topk_method", "noaux_tc", (("moe.bias_on", "scores"),)),
    FixedField("rope_interleave", True),
    # The published pace: arXiv:2412.19437, section 4.2.
    ImpliedSettings((("moe.bias_update", "sign"), ("moe.bias_rate", 0.001))),
  ),
)
