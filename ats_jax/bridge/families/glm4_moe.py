"""GLM-4-MoE: experts chosen with a selection bias, beside ordinary grouped-query attention."""

import dataclasses

from ats_jax.bridge.families import deepseek
from ats_jax.bridge.families.common import (
  ATTENTION,
  ATTENTION_WITH_BIAS,
  MLP,
  NORMS,
  QK_NORM,
  SHARED_EXPERTS,
  TABLES,
  HeadDim,
  KVHeads,
  RopeFields,
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
from ats_jax.bridge.transforms import Shape
from ats_jax.config.schema import Config

PART = "partial_rotary_factor"


@dataclasses.dataclass(frozen=True)
class _WholeRope(RopeFields):
  """`RopeFields` with `partial_rotary_factor`, in the block or beside it: all of a head rotates."""

  keys: tuple[str, ...] = (*RopeFields.keys, PART)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    block = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    fields = dict(theirs.get(block) or {})
    part = fields.pop(PART, theirs.get(PART, 0.5))
    if part != 1.0:
      raise ValueError(
        f"{PART} is {part!r} in config.json (0.5 where it is missing), and this program rotates "
        "all of a head."
      )
    return super().read({**theirs, block: fields})

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    fields = dict(super().write(cfg))
    for block in fields.keys() & {"rope_parameters", "rope_scaling"}:
      fields[block] = {**fields[block], PART: 1.0}
    return {**fields, PART: 1.0}


def without_shared(settings: Values) -> dict[str, Shape]:
  """The matrices of shared experts of width 0, which `transformers` has where there is none."""
  if settings["moe.num_shared"]:
    return {}
  width = settings["model.d_model"]
  shapes = {"gate": (0, width), "up": (0, width), "down": (width, 0)}
  return {
    f"model.layers.{layer}.mlp.shared_experts.{name}_proj.weight": shape
    for layer in range(settings["moe.dense_first"], settings["model.num_layers"])
    for name, shape in shapes.items()
  }


FAMILY = Family(
  name="GLM-4-MoE",
  model_type="glm4_moe",
  architecture="Glm4MoeForCausalLM",
  rates=False,
  rows=(
    *(*TABLES, *NORMS, *QK_NORM),
    *experts("mlp", "gate_proj", "up_proj", "down_proj", bias="e_score_correction_bias"),
    *(*MLP, *SHARED_EXPERTS),
  ),
  fitted_rows=lambda of: ATTENTION_WITH_BIAS if of["model.qkv_bias"] else ATTENTION,
  fields=(
    *size_fields(eps=1e-5),
    KVHeads(8),
    HeadDim(),
    _WholeRope(),
    SettingField("attention_bias", "model.qkv_bias", False),
    SettingField("use_qk_norm", "model.qk_norm", False),
    SettingField("n_group", "moe.num_groups", 1),
    SettingField("topk_group", "moe.top_groups", 1),
    SettingField("n_routed_experts", "moe.num_experts", 128),
    SettingField("num_experts_per_tok", "moe.top_k", 8),
    SettingField("moe_intermediate_size", "moe.d_ff", 1408),
    SettingField("n_shared_experts", "moe.num_shared", 1),
    SettingField("routed_scaling_factor", "moe.route_scale", 1.0),
    SettingField("first_k_dense_replace", "moe.dense_first", 1),
    SettingField("norm_topk_prob", "moe.renormalize", True),
    FixedField("hidden_act", "silu"),
    deepseek.Beside(("num_mtp_layers",)),
    # What training begins with: the pace of DeepSeek-V3.
    ImpliedSettings(
      (
        ("moe.score", "sigmoid"),
        ("moe.bias_on", "scores"),
        ("moe.bias_update", "sign"),
        ("moe.bias_rate", 0.001),
      )
    ),
  ),
  training=(*TRAINING, deepseek.NO_FURTHER_TOKENS),
  aside=deepseek.next_tokens,
  empty=without_shared,
)
