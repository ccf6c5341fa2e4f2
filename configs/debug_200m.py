"""124M parameters dense, 1.9B with 32 experts: tests of the architecture on a small machine.

Dimensions: ats_jax/config/presets.py. Sizes of all variants: docs/reference/models.md.
Command: python -m ats_jax plan --config=configs/debug_200m.py:moe
"""

from ats_jax.config.presets import preset


def get_config(variant: str = ""):
  return preset("debug_200m", variant)
