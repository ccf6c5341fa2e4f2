"""4.4B parameters in 8 experts a layer and a shared one.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/p828_800m.py:dense
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("p828_800m", variant)
