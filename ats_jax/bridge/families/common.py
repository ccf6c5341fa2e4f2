"""Rows that many families share."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ats_jax.bridge.family import (
  FieldRow,
  FixedField,
  ImpliedSettings,
  OwnWeight,
  SettingField,
  Values,
  WeightRow,
)
from ats_jax.bridge.transforms import FLAT, SAME, TRANSPOSED, TRANSPOSED_2
from ats_jax.config.schema import Config
from ats_jax.model.layer_kinds import layer_kinds

L, THEIRS = "layers/{layer}", "model.layers.{layer}"

TIED_TABLES = (
  WeightRow("embed", "model.embed_tokens.weight", SAME),
  WeightRow("final_norm/scale", "model.norm.weight", SAME),
)
TABLES = (*TIED_TABLES, WeightRow("head", "lm_head.weight", SAME))
NORMS = (
  WeightRow(f"{L}/attn_norm/scale", f"{THEIRS}.input_layernorm.weight", SAME),
  WeightRow(f"{L}/mlp_norm/scale", f"{THEIRS}.post_attention_layernorm.weight", SAME),
)
FOUR_NORMS = (
  WeightRow(f"{L}/attn_norm/scale", f"{THEIRS}.input_layernorm.weight", SAME),
  WeightRow(f"{L}/attn_post_norm/scale", f"{THEIRS}.post_attention_layernorm.weight", SAME),
  WeightRow(f"{L}/mlp_norm/scale", f"{THEIRS}.pre_feedforward_layernorm.weight", SAME),
  WeightRow(f"{L}/mlp_post_norm/scale", f"{THEIRS}.post_feedforward_layernorm.weight", SAME),
)
OUT = WeightRow(f"{L}/attn/out", f"{THEIRS}.self_attn.o_proj.weight", TRANSPOSED_2)
ATTENTION = (
  *(WeightRow(f"{L}/attn/{p}", f"{THEIRS}.self_attn.{p}_proj.weight", TRANSPOSED) for p in "qkv"),
  OUT,
)
QKV_WITH_BIAS = (
  *(
    WeightRow(f"{L}/attn/{p}/weight", f"{THEIRS}.self_attn.{p}_proj.weight", TRANSPOSED)
    for p in "qkv"
  ),
  *(WeightRow(f"{L}/attn/{p}/bias", f"{THEIRS}.self_attn.{p}_proj.bias", FLAT) for p in "qkv"),
)
ATTENTION_WITH_BIAS = (*QKV_WITH_BIAS, OUT)
QK_NORM = tuple(
  WeightRow(f"{L}/attn/{p}_norm/scale", f"{THEIRS}.self_attn.{p}_norm.weight", SAME) for p in "qk"
)
MLP = tuple(
  WeightRow(f"{L}/mlp/{p}", f"{THEIRS}.mlp.{p}_proj.weight", TRANSPOSED)
  for p in ("gate", "up", "down")
)
SHARED_EXPERTS = tuple(
  WeightRow(f"{L}/mlp/shared/{p}", f"{THEIRS}.mlp.shared_experts.{p}_proj.weight", TRANSPOSED)
  for p in ("gate", "up", "down")
)

# The load of a step that has not been: every expert its share.
LOAD = OwnWeight(
  f"{L}/mlp/router/load_E", lambda shape: np.full(shape, 1 / shape[-1]), needed=False
)
# What a router keeps of balancing by a bias: experts are chosen by its differences.
BIAS = OwnWeight(f"{L}/mlp/router/bias_E", np.zeros, needed=True, counts_from_last=True)
BALANCE = (BIAS, LOAD)


def experts(
  prefix: str, gate: str, up: str, down: str, *, bias: str = ""
) -> tuple[WeightRow | OwnWeight, ...]:
  """Rows of a mixture of experts.

  Args:
    prefix: name of the module of experts in a layer.
    gate: name of an expert's matrix.
    up: name of an expert's up-projection.
    down: name of an expert's down-projection.
    bias: name of the router's selection bias; "" = there is none.
  """
  mlp, one = f"{L}/mlp", f"{THEIRS}.{prefix}.experts.{{expert}}"
  bias_E = f"{mlp}/router/bias_E"
  return (
    WeightRow(f"{mlp}/router/weight", f"{THEIRS}.{prefix}.gate.weight", TRANSPOSED),
    WeightRow(f"{mlp}/gate", f"{one}.{gate}.weight", TRANSPOSED),
    WeightRow(f"{mlp}/up", f"{one}.{up}.weight", TRANSPOSED),
    WeightRow(f"{mlp}/down", f"{one}.{down}.weight", TRANSPOSED),
    *(
      (WeightRow(bias_E, f"{THEIRS}.{prefix}.gate.{bias}", SAME, wide=True), LOAD)
      if bias
      else BALANCE
    ),
  )


def balance_fields(usual: float = 0.001) -> tuple[FieldRow, ...]:
  """Fields of training that balance experts; `usual` is what a missing weight of the loss means."""
  return (SettingField("router_aux_loss_coef", "moe.aux_loss", usual, null=usual),)


def gemma_fields() -> tuple[FieldRow, ...]:
  """Fields that the Gemmas share."""
  gelu = "gelu_pytorch_tanh"
  return (
    FixedField("hidden_activation", gelu, (("model.activation", "gelu_tanh"),)),
    FixedField("hidden_act", gelu),
    FixedField("attention_bias", False),
    FixedField("use_bidirectional_attention", None),
    ImpliedSettings(
      (
        ("model.post_norms", True),
        ("model.norm_plus_one", True),
        ("model.scale_embeddings", True),
      )
    ),
  )


def size_fields(*, eps: float, tied: bool = False, only_tied: bool = False) -> tuple[FieldRow, ...]:
  """Fields of every family.

  Args:
    eps: what a missing `rms_norm_eps` means.
    tied: what a missing `tie_word_embeddings` means.
    only_tied: whether the family's models have no output layer of their own.
  """
  head = (("model.tie_embeddings", True),)
  return (
    SettingField("vocab_size", "model.vocab_size"),
    SettingField("num_hidden_layers", "model.num_layers"),
    SettingField("hidden_size", "model.d_model"),
    SettingField("intermediate_size", "model.d_ff"),
    SettingField("num_attention_heads", "model.num_heads"),
    SettingField("rms_norm_eps", "model.norm_eps", eps),
    FixedField("tie_word_embeddings", True, head, "its output layer is the embedding")
    if only_tied
    else SettingField("tie_word_embeddings", "model.tie_embeddings", tied),
  )


@dataclasses.dataclass(frozen=True)
class HeadDim:
  """`head_dim`.

  Attributes:
    default: what a missing field means; 0 = hidden_size / num_attention_heads, as null does.
  """

  default: int = 0
  keys: tuple[str, ...] = ("head_dim",)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    head_dim = theirs.get("head_dim", self.default)
    return {"model.head_dim": head_dim or theirs["hidden_size"] // theirs["num_attention_heads"]}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    return {"head_dim": cfg.model.head_dim}


@dataclasses.dataclass(frozen=True)
class EqualHeads:
  """No `head_dim`: always hidden_size / num_attention_heads."""

  keys: tuple[str, ...] = ()

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    return {"model.head_dim": theirs["hidden_size"] // theirs["num_attention_heads"]}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    del cfg
    return {}


@dataclasses.dataclass(frozen=True)
class KVHeads:
  """`num_key_value_heads`.

  Attributes:
    default: what a missing field means; 0 = as many as query heads, as null does.
  """

  default: int = 0
  keys: tuple[str, ...] = ("num_key_value_heads",)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    num_kv_heads = theirs.get("num_key_value_heads", self.default)
    return {"model.num_kv_heads": num_kv_heads or theirs["num_attention_heads"]}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    return {"num_key_value_heads": cfg.model.num_kv_heads}


@dataclasses.dataclass(frozen=True)
class QueryScale:
  """`query_pre_attn_scalar`, whose inverse square root multiplies scores."""

  keys: tuple[str, ...] = ("query_pre_attn_scalar",)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    return {"model.attn_scale": theirs.get("query_pre_attn_scalar", 256) ** -0.5}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    scalar = cfg.model.attn_scale**-2 if cfg.model.attn_scale else cfg.model.head_dim
    is_whole = abs(scalar - round(scalar)) < 1e-6
    return {"query_pre_attn_scalar": round(scalar) if is_whole else scalar}


@dataclasses.dataclass(frozen=True)
class RopeFields:
  """The fields of rotary embeddings: `rope_parameters`, or two older fields.

  Older folders have `rope_theta` and `rope_scaling`. An export writes all three.

  Attributes:
    theta: the value that a missing `rope_theta` means.
    scaling: the fields of a scaling that a folder without any means.
    keys: fields of config.json, as of `FieldRow`.
  """

  theta: float = 10_000.0
  scaling: tuple[tuple[str, Any], ...] = ()
  keys: tuple[str, ...] = ("rope_parameters", "rope_theta", "rope_scaling")

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    fields = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or self.scaling)
    fields.setdefault("rope_theta", theirs.get("rope_theta", self.theta))
    return read_rope(fields, theirs.get("max_position_embeddings"))

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    fields = write_rope(cfg)
    older: dict[str, Any] = {"rope_theta": cfg.model.rope_theta}
    if cfg.model.rope_scaling.name != "none":
      older["rope_scaling"] = {k: v for k, v in fields.items() if k != "rope_theta"}
    return {"rope_parameters": fields, **older}


# Their words for a scaling's settings; of each kind the first two are needed.
_LLAMA3 = {
  "factor": "factor",
  "original_max_position_embeddings": "original_len",
  "low_freq_factor": "slow_turns",
  "high_freq_factor": "fast_turns",
}
_YARN = {
  "factor": "factor",
  "original_max_position_embeddings": "original_len",
  "beta_slow": "slow_turns",
  "beta_fast": "fast_turns",
  "truncate": "whole_pairs",
  "attention_factor": "concentration",
}
SCALINGS: Mapping[str, Mapping[str, str]] = {
  "default": {},
  "linear": {"factor": "factor"},
  "llama3": _LLAMA3,
  "yarn": _YARN,
}


def read_rope(fields: Mapping[str, Any], trained_len: int | None) -> Values:
  """Our settings for one block of rotary fields.

  Args:
    fields: with `rope_theta`; `rope_type` or `type` names a key of `SCALINGS`.
    trained_len: what a missing `original_max_position_embeddings` means.

  Raises:
    ValueError: for another type, or a field that belongs to none.
  """
  left = {k: v for k, v in fields.items() if v is not None}
  kinds = {left.pop(key) for key in ("rope_type", "type") if key in left} or {"default"}
  kind = kinds.pop()
  if kinds or kind not in SCALINGS:
    raise ValueError(
      f"the rotary scaling is {kind!r} in config.json, and this program has {', '.join(SCALINGS)}."
    )
  settings: dict[str, Any] = {"model.rope_theta": float(left.pop("rope_theta"))}
  settings["model.rope_scaling.name"] = "none" if kind == "default" else kind
  if "original_max_position_embeddings" in SCALINGS[kind] and trained_len:
    left.setdefault("original_max_position_embeddings", trained_len)
  if kind == "yarn":
    of_rotated, of_all = left.pop("mscale", None), left.pop("mscale_all_dim", None)
    if of_rotated and of_all:
      stretch = lambda scale: 0.1 * scale * math.log(left["factor"]) + 1.0
      left.setdefault("attention_factor", stretch(of_rotated) / stretch(of_all))
  for needed in list(SCALINGS[kind])[:2]:
    if needed not in left:
      raise ValueError(f"the rotary scaling {kind!r} has no {needed} in config.json.")
  for theirs, ours in SCALINGS[kind].items():
    if theirs in left:
      settings[f"model.rope_scaling.{ours}"] = left.pop(theirs)
  if left:
    name, value = next(iter(left.items()))
    raise ValueError(f"{name} of rotary scaling {kind!r} is {value!r}, which is not there.")
  return {k: float(v) if k in _FLOATS else v for k, v in settings.items()}


_FLOATS = frozenset(
  f"model.rope_scaling.{name}" for name in ("factor", "slow_turns", "fast_turns", "concentration")
)


def write_rope(cfg: Config) -> dict[str, Any]:
  """The block of rotary fields of a config."""
  scaling = cfg.model.rope_scaling
  kind = "default" if scaling.name == "none" else scaling.name
  fields: dict[str, Any] = {"rope_type": kind, "rope_theta": cfg.model.rope_theta}
  for theirs, ours in SCALINGS[kind].items():
    value = getattr(scaling, ours)
    if ours != "concentration" or value:
      fields[theirs] = value
  return fields


@dataclasses.dataclass(frozen=True)
class Layers:
  """`sliding_window` with the layers that have one: `layer_types`, or a rule of older folders.

  Attributes:
    window: the value that a missing `sliding_window` means.
    by_switch: as in Qwen, there is `use_sliding_window`, and layers from `max_window_layers` on
      have the window.
    full_every: as in Gemma, what missing `layer_types` mean.
    keys: fields of config.json, as of `FieldRow`; of these the class of `transformers` reads what
      says which layers have a window.
  """

  window: int = 4096
  by_switch: bool = False
  full_every: int = 0
  keys: tuple[str, ...] = (
    "sliding_window",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "_sliding_window_pattern",
  )

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    theirs = {"num_hidden_layers": theirs["num_hidden_layers"]} | {
      key: theirs[key] for key in self.keys if key in theirs
    }
    count, window = theirs["num_hidden_layers"], theirs.get("sliding_window", self.window)
    if not window or (self.by_switch and not theirs.get("use_sliding_window", False)):
      return {"model.window": 0, "model.full_every": 0}
    pattern = theirs.get("sliding_window_pattern", theirs.get("_sliding_window_pattern"))
    every = pattern or self.full_every
    if self.by_switch:
      first = theirs.get("max_window_layers", 28)
      has_window = [layer >= first for layer in range(count)]
    else:
      has_window = [not every or (layer + 1) % every != 0 for layer in range(count)]
    if types := theirs.get("layer_types"):
      has_window = [kind == "sliding_attention" for kind in types]
      if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)} in config.json, which is not there.")
    full = [layer for layer, has in enumerate(has_window) if not has]
    if len(full) == count:
      return {"model.window": 0, "model.full_every": 0}
    every = full[0] + 1 if full else 0
    if full != (list(range(every - 1, count, every)) if every else []):
      raise ValueError(
        f"layers {full} of {count} have no sliding window in config.json: no layer, all layers or "
        "every n-th can be without one here."
      )
    return {"model.window": window, "model.full_every": every}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    has_window = [kind.window for kind in layer_kinds(cfg)]
    kinds = {True: "sliding_attention", False: "full_attention"}
    fields: dict[str, Any] = {"sliding_window": cfg.model.window or None}
    if not self.by_switch and not self.full_every and len(set(has_window)) < 2:
      return fields  # Mistral's class is another one where it finds `layer_types`
    if "layer_types" not in self.keys:
      return fields
    fields["layer_types"] = [kinds[has] for has in has_window]
    if self.by_switch:
      full = has_window.index(True) if True in has_window else len(has_window)
      fields |= {"use_sliding_window": any(has_window), "max_window_layers": full}
    return fields
