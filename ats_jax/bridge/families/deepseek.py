"""DeepSeek-V2 and V3: latent attention, narrow experts beside shared ones, groups of experts."""

import dataclasses
import math
from typing import Any

from ats_jax.bridge.families.common import (
  MLP,
  NORMS,
  OUT,
  TABLES,
  THEIRS,
  L,
  Rope,
  experts,
  sizes,
)
from ats_jax.bridge.family import Always, Family, Field, FieldRow, Only, Row, Values
from ats_jax.bridge.transforms import SAME, TRANSPOSED, RopeHalves
from ats_jax.config.schema import Config
from ats_jax.config.schema.rope import Yarn

_ATTN = f"{THEIRS}.self_attn"
ROWS = (
  *(*TABLES, *NORMS, *MLP, OUT),
  Row(f"{L}/attn/q_down", f"{_ATTN}.q_a_proj.weight", TRANSPOSED),
  Row(f"{L}/attn/q_norm/scale", f"{_ATTN}.q_a_layernorm.weight", SAME),
  Row(f"{L}/attn/kv_norm/scale", f"{_ATTN}.kv_a_layernorm.weight", SAME),
  Row(f"{L}/attn/kv", f"{_ATTN}.kv_b_proj.weight", TRANSPOSED),
  *(
    Row(f"{L}/mlp/shared/{p}", f"{THEIRS}.mlp.shared_experts.{p}_proj.weight", TRANSPOSED)
    for p in ("gate", "up", "down")
  ),
)


def rotated(settings: Values) -> tuple[Row, ...]:
  """Rows of the matrices whose last columns become rotated pairs."""
  halves = RopeHalves(settings["model.latent_rope_dim"])
  queries = "q_b_proj" if settings["model.q_latent_dim"] else "q_proj"
  return (
    Row(f"{L}/attn/q", f"{_ATTN}.{queries}.weight", halves),
    Row(f"{L}/attn/kv_down", f"{_ATTN}.kv_a_proj_with_mqa.weight", halves),
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
    """See `FieldRow`."""
    part, heads = theirs.get("qk_rope_head_dim", 64), theirs["num_attention_heads"]
    width = theirs.get("qk_nope_head_dim", 128) + part
    follows = {"qk_head_dim": width, "head_dim": part, "num_key_value_heads": heads}
    for key, value in follows.items():
      if theirs.get(key) not in (None, value):
        raise ValueError(f"{key} is {theirs[key]!r} in config.json; {value} follows from the rest.")
    return {"model.head_dim": width, "model.num_kv_heads": heads}

  def write(self, cfg: Config) -> Values:
    """See `FieldRow`."""
    m = cfg.model
    fixed = m.head_dim - m.latent_rope_dim
    return {"qk_nope_head_dim": fixed, "num_key_value_heads": m.num_kv_heads}


@dataclasses.dataclass(frozen=True)
class _Yarn(Rope):
  """`Rope` where YaRN's `mscale_all_dim` stretches all scores, not only those of rotated parts."""

  def read(self, theirs: Values) -> Values:
    """See `FieldRow`."""
    found = dict(super().read(theirs))
    fields = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if found["model.rope_scaling.name"] == "yarn" and (scale := fields.get("mscale_all_dim")):
      width = theirs.get("qk_nope_head_dim", 128) + theirs.get("qk_rope_head_dim", 64)
      stretch = 0.1 * scale * math.log(found["model.rope_scaling.factor"]) + 1.0
      found["model.attn_scale"] = width**-0.5 * stretch * stretch
    return found

  def write(self, cfg: Config) -> Values:
    """See `FieldRow`."""
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
    """See `FieldRow`."""
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
    """See `FieldRow`."""
    if cfg.moe.num_groups == 1:
      return {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return {
      "topk_method": "group_limited_greedy",
      "n_group": cfg.moe.num_groups,
      "topk_group": cfg.moe.top_groups,
    }


@dataclasses.dataclass(frozen=True)
class _Beside:
  """What changes no setting: layers kept aside, the format of the files, code in the folder."""

  keys: tuple[str, ...] = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "quantization_config",
    "auto_map",
  )

  def read(self, theirs: Values) -> Values:
    """See `FieldRow`."""
    del theirs
    return {}

  def write(self, cfg: Config) -> Values:
    """See `FieldRow`."""
    del cfg
    return {"num_nextn_predict_layers": 0}


SHARED: tuple[FieldRow, ...] = (
  *sizes(eps=1e-6),
  Field("kv_lora_rank", "model.kv_latent_dim", 512),
  Field("q_lora_rank", "model.q_latent_dim", 1536, null=0),
  Field("qk_rope_head_dim", "model.latent_rope_dim", 64),
  Field("v_head_dim", "model.v_head_dim", 128),
  _KeyWidths(),
  _Yarn(),
  Only("hidden_act", "silu"),
  Only("attention_bias", False),
  Only("moe_layer_freq", 1),
  _Beside(),
)
V2 = Family(
  name="DeepSeek-V2",
  model_type="deepseek_v2",
  architecture="DeepseekV2ForCausalLM",
  rows=(*experts("mlp", "gate_proj", "up_proj", "down_proj"), *ROWS),
  fitted_rows=rotated,
  aside=next_tokens,
  fields=(
    *SHARED,
    _Groups(),
    Field("n_routed_experts", "moe.num_experts", 64),
    Field("num_experts_per_tok", "moe.top_k"),
    Field("moe_intermediate_size", "moe.d_ff", 1407),
    Field("n_shared_experts", "moe.num_shared", 2),
    Field("routed_scaling_factor", "moe.route_scale", 1.0),
    Field("first_k_dense_replace", "moe.dense_first", 0),
    Only("norm_topk_prob", False, (("moe.renormalize", False),)),
    Only("scoring_func", "softmax"),
    Only("mlp_bias", False),
    Always((("moe.bias_update", "none"),)),
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
  fields=(
    *SHARED,
    Field("n_group", "moe.num_groups", 8),
    Field("topk_group", "moe.top_groups", 4),
    Field("n_routed_experts", "moe.num_experts", 256),
    Field("num_experts_per_tok", "moe.top_k", 8),
    Field("moe_intermediate_size", "moe.d_ff", 2048),
    Field("n_shared_experts", "moe.num_shared", 1),
    Field("routed_scaling_factor", "moe.route_scale", 2.5),
    Field("first_k_dense_replace", "moe.dense_first", 3),
    Field("norm_topk_prob", "moe.renormalize", True),
    Only("scoring_func", "sigmoid", (("moe.score", "sigmoid"),)),
    Only("topk_method", "noaux_tc", (("moe.bias_on", "scores"),)),
    Only("rope_interleave", True),
    # The published pace: arXiv:2412.19437, section 4.2.
    Always((("moe.bias_update", "sign"), ("moe.bias_rate", 0.001))),
  ),
)
