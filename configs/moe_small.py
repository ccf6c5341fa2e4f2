"""9.2B parameters in 8 experts a layer, of which a token uses 2.9B.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/moe_small.py:dense
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("moe_small", variant)
