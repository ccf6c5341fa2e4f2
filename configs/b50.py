"""62B parameters dense, 392B with experts.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/b50.py:moe
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("b50", variant)
