"""The families that can be imported and exported, by `model_type`."""

from collections.abc import Mapping

from ats_jax.bridge.families import (
  deepseek,
  gemma,
  gemma2,
  gemma3,
  glm4_moe,
  gpt_oss,
  llama,
  mistral,
  mixtral,
  olmoe,
  own,
  qwen2,
  qwen3,
  qwen3_moe,
)
from ats_jax.bridge.family import Family

_OF_EXPERTS = (mixtral, qwen3_moe, olmoe, gpt_oss, glm4_moe)
_MODULES = (llama, mistral, qwen2, qwen3, gemma2, gemma3, *_OF_EXPERTS)
FAMILIES: Mapping[str, Family] = {
  family.model_type: family
  for family in (*(module.FAMILY for module in _MODULES), deepseek.V2, deepseek.V3)
}
# With those of which only the config can be read, for a run from scratch.
CONFIGS: Mapping[str, Family] = {**FAMILIES, gemma.FAMILY.model_type: gemma.FAMILY}
# With our own format, which says everything: an export takes it only where it is asked for.
KNOWN: Mapping[str, Family] = {**FAMILIES, own.MODEL_TYPE: own.FAMILY}
