"""549M parameters in 8 experts a layer, of which a token uses 209M.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/moe_200m.py:dense
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("moe_200m", variant)
