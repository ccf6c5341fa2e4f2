"""531B parameters dense, 3.4T with experts.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/b300.py:moe
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("b300", variant)
