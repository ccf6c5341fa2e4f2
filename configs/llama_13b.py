"""14.8B parameters, the shape of Llama 3 between 8B and 70B.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/llama_13b.py:moe
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("llama_13b", variant)
