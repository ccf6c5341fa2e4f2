"""360M parameters: the shape and the recipe of GPT-3's second size.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/gpt_350m.py:moe
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("gpt_350m", variant)
