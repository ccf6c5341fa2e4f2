"""Folders of Hugging Face's with random weights, made without its libraries."""

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ats_jax.bridge.convert import abstract_parts
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.family import WeightRow, match_weights
from ats_jax.bridge.safetensors_file import Slot, Writer
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.schema import Config

BFLOAT16 = ml_dtypes.bfloat16
FIELDS = {
  "vocab_size": 272,
  "num_hidden_layers": 2,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
}
LATENT = {
  "num_key_value_heads": 4,
  "q_lora_rank": 12,
  "kv_lora_rank": 16,
  "qk_nope_head_dim": 10,
  "qk_rope_head_dim": 8,
  "v_head_dim": 6,
  "n_routed_experts": 4,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 16,
  "n_shared_experts": 1,
  "first_k_dense_replace": 1,
}
OF_KIND: dict[str, dict[str, Any]] = {
  "deepseek_v2": {**LATENT, "q_lora_rank": None},
  "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
  "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
  "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
  "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
  "glm4_moe": {
    **{key: LATENT[key] for key in LATENT if "expert" in key or key.startswith(("moe", "first"))},
    **{"partial_rotary_factor": 1.0, "n_group": 2, "topk_group": 1, "use_qk_norm": True},
  },
  "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
}


def fields_of(kind: str, **changes: Any) -> dict[str, Any]:
  fields = {"model_type": kind, **FIELDS, **OF_KIND.get(kind, {}), **changes}
  if "head_dim" not in {key for row in FAMILIES[kind].fields for key in row.keys}:
    del fields["head_dim"]
  return fields


def make_folder(
  folder: Path, kind: str = "llama", *, dtype: Any = np.float32, shards: int = 1, **changes: Any
) -> Path:
  """Write config.json and random tensors, in `shards` files."""
  fields = fields_of(kind, **changes)
  tensors = random_tensors(fields, dtype)
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(fields))
  names = list(tensors)
  parts = [names[i::shards] for i in range(shards)]
  file = "model.safetensors" if shards == 1 else "model-{:05}-of-{:05}.safetensors"
  by_name = {}
  for number, part in enumerate(parts, 1):
    path = folder / file.format(number, shards)
    write_tensors(path, {name: tensors[name] for name in part})
    by_name |= dict.fromkeys(part, path.name)
  if shards > 1:
    index = json.dumps({"metadata": {}, "weight_map": by_name})
    (folder / "model.safetensors.index.json").write_text(index)
  return folder


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
  slots = [Slot(name, array.dtype, array.shape) for name, array in tensors.items()]
  with Writer(path, slots) as writer:
    for name, array in tensors.items():
      writer.write(name, array)


@functools.cache
def shapes_of(cfg: Config) -> dict[str, tuple[int, ...]]:
  """The shapes of a model's arrays, by name."""
  return {name: part.shape for name, part in abstract_parts(cfg).items()}


def random_tensors(fields: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
  family = FAMILIES[fields["model_type"]]
  settings = family.read(fields)
  cfg = with_settings(Config(), {"data.tokenizer": "bytes", **settings})
  rng, tensors = np.random.default_rng(0), {}
  for item in match_weights(family.fitted(settings), shapes_of(resolve(cfg, 0))):
    for name in item.theirs:
      kept = np.float32 if isinstance(item.row, WeightRow) and item.row.wide else dtype
      tensors[name] = rng.normal(0, 0.2, item.their_shape).astype(kept)
  return tensors
