"""Gemma 3, text: as Gemma 2 with norms of queries and keys, two rotary bases, every sixth full."""

import dataclasses

from ats_jax.bridge.families.common import (
  ATTENTION,
  FOUR_NORMS,
  MLP,
  QK_NORM,
  TIED_TABLES,
  HeadDim,
  KVHeads,
  Layers,
  QueryScale,
  gemma_fields,
  read_rope,
  size_fields,
  write_rope,
)
from ats_jax.bridge.family import Family, FixedField, ImpliedSettings, SettingField, Values
from ats_jax.config.schema import Config

LAYERS = Layers(full_every=6)


@dataclasses.dataclass(frozen=True)
class _Ropes:
  """Rotary settings of layers with and without a window."""

  keys: tuple[str, ...] = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
  )

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    nested = theirs.get("rope_parameters") or {}
    full = dict(nested.get("full_attention") or theirs.get("rope_scaling") or {})
    full.setdefault("rope_theta", theirs.get("rope_theta", 1e6))
    local = dict(nested.get("sliding_attention") or {})
    local.setdefault("rope_theta", theirs.get("rope_local_base_freq", 1e4))
    of_windows = read_rope(local, None)
    if of_windows["model.rope_scaling.name"] != "none":
      raise ValueError("the rotary frequencies of sliding windows are scaled in config.json.")
    has_windows = LAYERS.read(theirs)["model.window"] > 0
    theta = of_windows["model.rope_theta"] if has_windows else 0.0
    trained_len = theirs.get("max_position_embeddings")
    return {**read_rope(full, trained_len), "model.window_rope_theta": theta}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    theta = cfg.model.window_rope_theta or cfg.model.rope_theta
    full, local = write_rope(cfg), {"rope_type": "default", "rope_theta": theta}
    fields = {"full_attention": full, "sliding_attention": local}
    return {
      "rope_parameters": fields,
      "rope_theta": cfg.model.rope_theta,
      "rope_local_base_freq": theta,
    }


FAMILY = Family(
  name="Gemma 3",
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  rows=(*TIED_TABLES, *FOUR_NORMS, *ATTENTION, *QK_NORM, *MLP),
  fields=(
    *size_fields(eps=1e-6, only_tied=True),
    KVHeads(4),
    HeadDim(256),
    _Ropes(),
    LAYERS,
    QueryScale(),
    # transformers reads it and does not apply it.
    FixedField("attn_logit_softcapping", None, (("model.attn_soft_cap", 0.0),)),
    SettingField("final_logit_softcapping", "model.logit_soft_cap", 0.0, null=0.0),
    *gemma_fields(),
    ImpliedSettings((("model.qk_norm", True),)),
  ),
)
