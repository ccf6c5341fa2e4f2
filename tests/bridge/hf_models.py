"""Small models of `transformers` with random weights that every setting and weight shows in."""

import math
from pathlib import Path

import numpy as np
import torch
import transformers

SEQ_LEN = 96
SMALL = {
  "vocab_size": 272,
  "hidden_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 56,
  "rms_norm_eps": 0.02,
  "max_position_embeddings": 512,
  "bos_token_id": None,
  "eos_token_id": None,
  "pad_token_id": None,
}
ODD = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 500.0,
  "factor": 4.0,
  "beta_fast": 2.0,
  "beta_slow": 0.25,
  "truncate": False,
  "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
MOE = {"num_experts_per_tok": 3, "rope_parameters": PLAIN}
YARN_ALL = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}
LATENT = {
  "num_key_value_heads": 4,
  "q_lora_rank": 20,
  "kv_lora_rank": 24,
  "qk_nope_head_dim": 12,
  "qk_rope_head_dim": 8,
  "v_head_dim": 10,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 24,
  "n_shared_experts": 2,
  "first_k_dense_replace": 1,
  "routed_scaling_factor": 1.5,
  "rope_parameters": PLAIN,
}
ODD_LATENT = {
  **LATENT,
  "hidden_size": 36,
  "num_attention_heads": 3,
  "num_key_value_heads": 3,
  "qk_nope_head_dim": 10,
  "qk_rope_head_dim": 12,
  "v_head_dim": 26,
  "n_shared_experts": 1,
  "first_k_dense_replace": 0,
  "rope_parameters": YARN_ALL,
}
GLM = {
  **{key: LATENT[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")},
  **{key: LATENT[key] for key in ("moe_intermediate_size", "routed_scaling_factor")},
  "first_k_dense_replace": 1,
  "head_dim": 12,
  "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0},
}
QWEN = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 24}

# Name -> model_type, fields beyond `SMALL`.
CASES: dict[str, tuple[str, dict]] = {
  "llama": ("llama", {"rope_parameters": PLAIN}),
  "llama-odd-llama3": ("llama", {**ODD, "rope_parameters": LLAMA3}),
  "llama-tied-linear": (
    "llama",
    {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_parameters": LINEAR},
  ),
  "mistral-window": ("mistral", {"sliding_window": 20, "rope_parameters": PLAIN}),
  "qwen2": ("qwen2", {"rope_parameters": PLAIN}),
  "qwen2-yarn-window": ("qwen2", {**QWEN, "tie_word_embeddings": True, "rope_parameters": YARN}),
  "qwen3": ("qwen3", {"head_dim": 20, "rope_parameters": PLAIN}),
  "qwen3-odd-yarn": (
    "qwen3",
    {**ODD, "rope_parameters": {**YARN, "attention_factor": 1.3}},
  ),
  "gemma2": (
    "gemma2",
    {
      "head_dim": 16,
      "query_pre_attn_scalar": 20,
      "sliding_window": 20,
      "attn_logit_softcapping": 8.0,
      "final_logit_softcapping": 6.0,
      "rope_parameters": PLAIN,
    },
  ),
  "gemma2-odd": (
    "gemma2",
    {
      **ODD,
      "query_pre_attn_scalar": 14,
      "sliding_window": 24,
      "attn_logit_softcapping": None,
      "final_logit_softcapping": None,
      "rope_parameters": LINEAR,
    },
  ),
  "gemma3": (
    "gemma3_text",
    {
      "head_dim": 16,
      "query_pre_attn_scalar": 20,
      "sliding_window": 20,
      "layer_types": ["sliding_attention", "full_attention"],
      "rope_parameters": {
        "full_attention": LINEAR,
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
      },
    },
  ),
  "mixtral": ("mixtral", {**MOE, "num_local_experts": 5, "head_dim": 12}),
  "mixtral-odd-window": (
    "mixtral",
    {**MOE, **ODD, "num_local_experts": 4, "sliding_window": 20, "rope_parameters": LINEAR},
  ),
  "qwen3_moe": (
    "qwen3_moe",
    {**MOE, "num_experts": 6, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True},
  ),
  "qwen3_moe-every-second": (
    "qwen3_moe",
    {**MOE, **ODD, "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2}
    | {"rope_parameters": {**YARN, "truncate": True, "attention_factor": 1.0}},
  ),
  "gpt_oss": (
    "gpt_oss",
    {**MOE, "num_local_experts": 5, "head_dim": 12, "sliding_window": 20, "swiglu_limit": 0.9}
    | {"rope_parameters": YARN},
  ),
  "gpt_oss-odd": (
    "gpt_oss",
    {**MOE, **ODD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    | {"num_hidden_layers": 3}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    | {"swiglu_limit": 1.4, "swiglu_alpha": 1.1, "tie_word_embeddings": True}
    | {"rope_parameters": {**YARN, "truncate": True, "attention_factor": 1.2}},
  ),
  "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
  "deepseek_v2-odd-groups-yarn": (
    "deepseek_v2",
    {**ODD_LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
  ),
  "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2}),
  "deepseek_v3-odd-yarn": (
    "deepseek_v3",
    {**ODD_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
  ),
  "glm4_moe": ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 2, "use_qk_norm": True}),
  "glm4_moe-odd-yarn": (
    "glm4_moe",
    {**GLM, **ODD, "n_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": False}
    | {"attention_bias": True, "rope_parameters": {**YARN, "partial_rotary_factor": 1.0}},
  ),
  "olmoe-normed": (
    "olmoe",
    {**MOE, "num_experts": 4, "norm_topk_prob": True, "rope_parameters": LLAMA3},
  ),
}


SHARP = 1.75  # of queries and keys: the scores of attention spread by its square


def make(case: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
  """The model of a case, in float32."""
  kind, fields = CASES[case]
  config = transformers.AutoConfig.for_model(kind, **{**SMALL, **fields, **changes})
  config._attn_implementation = "eager"
  torch.manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
  randomise(model)
  return model.eval()


def randomise(model: transformers.PreTrainedModel) -> None:
  """Weights under which logits spread, attention looks at few tokens, and all of them matter."""
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if weight.ndim == 1:
        is_norm = name.endswith("norm.weight")
        start = 1.0 if is_norm and "gemma" not in model.config.model_type else 0.0
        if "q_norm" in name or "k_norm" in name:
          start += 0.9
        torch.nn.init.normal_(weight, start, 0.3)
        continue
      if not weight.numel():
        continue
      spread = 1 / math.sqrt(weight.shape[-1])
      if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj", "kv_a_proj")):
        spread *= SHARP
      if "lm_head" in name:
        spread *= 2
      if "embed_tokens" in name:
        spread = 0.5 if "gemma" not in model.config.model_type else 0.3
      torch.nn.init.normal_(weight, 0.0, spread)
    for name, buffer in model.named_buffers():
      if name.endswith("e_score_correction_bias"):
        torch.nn.init.normal_(buffer, 0.0, 0.2)
    if model.config.tie_word_embeddings:
      model.tie_weights()


def save(model: transformers.PreTrainedModel, folder: Path, **options) -> Path:
  model.save_pretrained(folder, **options)
  return folder


def load(folder: Path) -> transformers.PreTrainedModel:
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
  ).eval()


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
  with torch.no_grad():
    return model(torch.from_numpy(tokens)).logits.float().numpy()


def rows(seed: int = 0, count: int = 2, length: int = SEQ_LEN) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, SMALL["vocab_size"], (count, length))
