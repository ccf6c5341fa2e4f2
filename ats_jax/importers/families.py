"""Families of which `config.json` can be read, and no weights: tables of the bridge's rows."""

from collections.abc import Mapping

from ats_jax.bridge.families.common import HeadDim, KVHeads, Rope, gemma, sizes
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
  "deepseek_v3": (
    *sizes(eps=1e-6),
    KVHeads(),
    Rope(),
    Field("v_head_dim", "model.head_dim", 128),
    Field("n_routed_experts", "moe.num_experts", 256),
    Field("num_experts_per_tok", "moe.top_k", 8),
    Field("moe_intermediate_size", "moe.d_ff", 2048),
    Field("n_shared_experts", "moe.num_shared", 1),
    Field("norm_topk_prob", "moe.renormalize", True),
    Field("routed_scaling_factor", "moe.route_scale", 2.5),
    Field("n_group", "moe.num_groups", 8),
    Field("topk_group", "moe.top_groups", 4),
    Field("first_k_dense_replace", "moe.dense_first", 3),
    Field("moe_layer_freq", "moe.every", 1),
    Only("scoring_func", "sigmoid", (("moe.score", "sigmoid"),)),
    Only("topk_method", "noaux_tc"),
    Only("hidden_act", "silu"),
    Only("attention_bias", False),
    *(Only(f"{part}_lora_rank", None) for part in ("q", "kv")),
    *(Only(f"qk_{part}head_dim", None) for part in ("rope_", "nope_", "")),
    Only("num_nextn_predict_layers", 0),
    Only("aux_loss_alpha", 0.0),
    Only("seq_aux", False),
  ),
}
# What such a model does that this one does not, and no field of its file says.
LACKS: Mapping[str, str] = {
  "deepseek_v3": "attention is latent (MLA); here it is grouped-query, with heads of v_head_dim",
}
