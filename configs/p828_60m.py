"""57M parameters in 4 experts and a shared one: a test of the pipeline.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/p828_60m.py:dense
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("p828_60m", variant)
