"""A `config.json` of a Hugging Face model: the shape of a decoder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ats_jax.config.importers.found import REQUIRED, Found, flat

LONGEST_ROW = 4096  # what data.seq_len is set to where a model has more positions


@dataclasses.dataclass(frozen=True)
class Family:
  """What a `model_type` means beside the names in its file.

  Attributes:
    lacks: what it does that this model does not.
    settings: of ours that it implies.
    defaults: of transformers, where they are not those of `take` below.
  """

  lacks: tuple[str, ...] = ()
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_WINDOWS = "attention in a sliding window in some layers"
_GEMMA = (
  "embeddings are multiplied by sqrt(hidden_size)",
  "norms multiply by 1 + weight; here by weight, which begins at 1",
)
FAMILIES = {
  "llama": Family(),
  "mistral": Family(defaults={"sliding_window": 4096}),
  "mixtral": Family(defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
  "qwen2": Family(lacks=("queries, keys and values have a bias",)),
  "qwen3": Family(settings={"model.qk_norm": True}, defaults={"head_dim": 128}),
  "qwen3_moe": Family(
    settings={"model.qk_norm": True},
    defaults={"norm_topk_prob": False, "router_aux_loss_coef": 0.001},
  ),
  "olmoe": Family(
    lacks=("queries and keys are normalised over all heads at once; here each head by itself",),
    settings={"model.qk_norm": True},
    defaults={"norm_topk_prob": False, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.01},
  ),
  "deepseek_v3": Family(
    lacks=(
      "attention is latent (MLA); here it is grouped-query attention with heads of v_head_dim",
    ),
    settings={"moe.score": "sigmoid"},
    defaults={"norm_topk_prob": True},
  ),
  "gpt_oss": Family(
    lacks=(
      "each head has an attention sink",
      "SwiGLU is clamped, scaled and shifted",
      "attention and experts have biases",
    ),
    settings={"moe.router_bias": True},
    defaults={"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
  ),
  "gemma": Family(lacks=_GEMMA, defaults={"tie_word_embeddings": True, "head_dim": 256}),
  "gemma2": Family(
    lacks=(*_GEMMA, _WINDOWS, "sub-layers are normalised behind as well as before"),
    defaults={"tie_word_embeddings": True, "head_dim": 256},
  ),
}


def is_model(values: Mapping[str, Any]) -> bool:
  """Whether a JSON object is a model's config.json."""
  return "model_type" in values or "architectures" in values


def read(values: Mapping[str, Any], path: Path) -> Found:
  """Read a config.json.

  Args:
    values: the file.
    path: where it is; a tokenizer.json beside it is taken.

  Raises:
    ValueError: for a kind of model that is not known here, or a name that is missing or wrong.
  """
  kind = values.get("model_type")
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise ValueError(
      f"model_type={kind!r} is no model that can be read. Known: {', '.join(FAMILIES)}."
    )
  family = FAMILIES[kind]
  found = Found(f"Hugging Face model, {kind}", flat(values))
  found.give("model_type", dict(family.settings), "a decoder with RMSNorm, RoPE and a gated MLP")
  for lack in family.lacks:
    found.lack("model_type", lack)
  _shape(found, family)
  _rope(found, family)
  if any(found.get(name) for name in _EXPERTS):
    _experts(found, family)
  _run(found, path)
  _always(found, family)
  return found.finish()


def _shape(found: Found, family: Family) -> None:
  default = family.defaults.get
  found.take("vocab_size", "model.vocab_size")
  found.take("num_hidden_layers", "model.num_layers")
  found.take("hidden_size", "model.d_model")
  heads = found.take("num_attention_heads", "model.num_heads")
  found.take("num_key_value_heads", "model.num_kv_heads", heads)
  found.take("intermediate_size", "model.d_ff")
  if "v_head_dim" in found.values:
    found.take("v_head_dim", "model.head_dim")
    found.ignore("a part of latent attention", "head_dim")
  else:
    found.take("head_dim", "model.head_dim", default("head_dim", 0))
  found.take("rms_norm_eps", "model.norm_eps", default("rms_norm_eps", 1e-6))
  found.take("tie_word_embeddings", "model.tie_embeddings", default("tie_word_embeddings", False))
  found.take("initializer_range", "model.init_std", 0.02)


def _rope(found: Found, family: Family) -> None:
  theta = family.defaults.get("rope_theta", 10_000.0)
  nested = "rope_parameters.rope_theta"  # since transformers 5
  found.take(nested if nested in found.values else "rope_theta", "model.rope_theta", theta, float)
  found.ignore("rope_parameters has it", "rope_theta")
  for section in ("rope_parameters", "rope_scaling"):
    found.expect(section, {}, what="RoPE is scaled")
    names = [name for name in found.values if name.startswith(f"{section}.") and name != nested]
    kinds = {str(found.get(f"{section}.{key}", "default")) for key in ("rope_type", "type")}
    for name in names:
      if kinds == {"default"} and name.rpartition(".")[2] in ("rope_type", "type"):
        found.ignore("so it is here", name)
      else:
        found.lack(name, "RoPE is scaled or partial")


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _experts(found: Found, family: Family) -> None:
  first = next(name for name in _EXPERTS if found.get(name))
  default = family.defaults.get
  found.take(first, "moe.num_experts")
  found.take("num_experts_per_tok", "moe.top_k", REQUIRED)
  if "moe_intermediate_size" in found.values:
    found.take("moe_intermediate_size", "moe.d_ff")
  found.take("n_shared_experts", "moe.num_shared", 0)
  found.take("norm_topk_prob", "moe.renormalize", default("norm_topk_prob", True))
  found.take("routed_scaling_factor", "moe.route_scale", 1.0, float)
  found.take("n_group", "moe.num_groups", 1)
  found.take("topk_group", "moe.top_groups", 1)
  found.take("first_k_dense_replace", "moe.dense_first", 0)
  every = "decoder_sparse_step" if "decoder_sparse_step" in found.values else "moe_layer_freq"
  found.take(every, "moe.every", 1)
  dense = found.get("mlp_only_layers")
  if dense and isinstance(dense, list) and dense == list(range(len(dense))):
    found.take("mlp_only_layers", "moe.dense_first", 0, len)
  else:
    found.expect("mlp_only_layers", [], what="layers without experts in the middle")
  if found.values["model_type"] != "deepseek_v3":
    found.take(
      "router_aux_loss_coef", "moe.aux_loss", default("router_aux_loss_coef", 0.001), float
    )
  found.expect("router_jitter_noise", 0.0, 0, what="noise on the input of the router")
  if "scoring_func" in found.values:
    found.take("scoring_func", "moe.score")
  found.expect("topk_method", "noaux_tc", what="another way to choose experts")
  found.ignore("what a forward pass returns", "output_router_logits")
  found.lack_all("balance losses of its own; here moe.aux_loss", "aux_loss_alpha", "seq_aux")
  found.notes.append(
    "Experts are balanced as here: moe.bias_update=proportional and moe.z_loss=0.001. "
    "Set them to 'none' and 0 to leave balance to moe.aux_loss."
  )


def _run(found: Found, path: Path) -> None:
  """What a run needs beside the shape."""
  found.settings["data.seq_len"] = LONGEST_ROW
  if found.get("max_position_embeddings"):
    found.take(
      "max_position_embeddings", "data.seq_len", LONGEST_ROW, lambda n: min(n, LONGEST_ROW)
    )
  for name in ("torch_dtype", "dtype"):
    value = found.get(name)
    if value in ("bfloat16", "float32"):
      found.give(name, {"precision.compute_dtype": value}, "weights are trained in float32")
    elif value:
      found.lack(name, "matmuls are in bfloat16 or float32; bfloat16 is used")
    else:
      found.ignore("not said", name)
  tokenizer = path.resolve().parent / "tokenizer.json"
  if tokenizer.is_file():
    found.settings["data.tokenizer"] = str(tokenizer)
    found.notes.append(f"The tokenizer is the one beside the file: {tokenizer}.")
  else:
    found.settings["data.bpe_vocab_size"] = min(2048, max(300, found.whole("vocab_size", 0)))
    found.notes.append(
      "There is no tokenizer.json beside the file: a BPE is trained on your text. "
      "--config.data.tokenizer=FILE names the model's own."
    )


def _always(found: Found, family: Family) -> None:
  """Names whose values this model has, or has not."""
  found.expect("hidden_act", "silu", what="the activation of the MLP; here it is silu")
  found.expect("hidden_activation", "silu", what="the activation of the MLP; here it is silu")
  found.expect("attention_bias", False, what="projections of attention have biases")
  found.expect("qkv_bias", False, what="queries, keys and values have biases")
  found.expect("mlp_bias", False, what="the MLP has biases")
  found.expect("attention_dropout", 0.0, 0, what="dropout of attention's weights")
  found.expect("clip_qkv", what="queries, keys and values are clipped")
  found.expect("pretraining_tp", 1, what="matmuls in slices")
  found.expect("partial_rotary_factor", 1.0, 1, what="only a part of a head is rotated")
  found.expect("use_sliding_window", False, what=_WINDOWS)
  if found.get("use_sliding_window") is False:
    found.ignore("windows are off", "sliding_window", "max_window_layers")
  elif "sliding_window" in found.values:
    found.expect("sliding_window", what="attention reaches back so far; here to the row's begin")
  elif "sliding_window" in family.defaults:
    found.lack("model_type", f"sliding_window is {family.defaults['sliding_window']} where the "
               "file does not say it; here attention reaches back to the row's begin")  # fmt: skip
  layers = found.get("layer_types", [])
  full = ["full_attention"] * len(layers) if isinstance(layers, list) else []
  found.expect("layer_types", full, what=_WINDOWS)
  found.lack_all("caps on logits", "attn_logit_softcapping", "final_logit_softcapping")
  found.lack_all("a loss on tokens further ahead", "num_nextn_predict_layers")
  found.lack_all("a part of latent attention", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
                 "qk_nope_head_dim", "qk_head_dim")  # fmt: skip
  found.lack_all("the clamp of SwiGLU", "swiglu_limit", "swiglu_alpha")
  found.lack_all("attention to what follows", "use_bidirectional_attention")
  found.ignore(
    "nothing for training", "architectures", "transformers_version", "use_cache", "_name_or_path",
    "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "rope_interleave", "ep_size",
    "attn_implementation", "_attn_implementation", "return_dict", "is_encoder_decoder",
  )  # fmt: skip
