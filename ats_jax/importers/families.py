"""Families of which `config.json` can be read, and no weights: tables of the bridge's rows."""

from collections.abc import Mapping

from ats_jax.bridge.families.common import HeadDim, KVHeads, Layers, Rope, gemma, sizes
from ats_jax.bridge.family import Always, Field, FieldRow, Only

FIELDS: Mapping[str, tuple[FieldRow, ...]] = {
  "gemma": (
    *sizes(eps=1e-6, tied=True),
    KVHeads(16),
    HeadDim(256),
    Rope(),
    *gemma(),
    Always((("model.post_norms", False),)),
  ),
  "gpt_oss": (
    *sizes(eps=1e-5),
    KVHeads(8),
    HeadDim(64),
    Rope(150_000.0),
    Layers(window=128, full_every=2),
    Field("num_local_experts", "moe.num_experts", 128),
    Field("num_experts_per_tok", "moe.top_k", 4),
    Field("attention_bias", "model.qkv_bias", True),
    Only("hidden_act", "silu"),
    Only("swiglu_limit", None),
    Always((("moe.router_bias", True), ("moe.renormalize", True))),
  ),
}
# What such a model does that this one does not, and no field of its file says.
LACKS: Mapping[str, str] = {
  "gpt_oss": "heads have an attention sink, SwiGLU is clamped, attention's output and experts have "
  "biases",
}
