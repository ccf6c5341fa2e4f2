"""Which layers multiply in 8 bits with `precision.fp8`; the matmul is `ops/fp8_matmul.py`."""

from ats_jax.config.schema import Config
from ats_jax.model.layer_kinds import layer_kinds


def fp8_layers(cfg: Config) -> tuple[bool, ...]:
  """Tell for each layer, from the bottom up, whether it multiplies in 8 bits.

  This concerns the layer's projections and its dense feed-forward. It is not part of `LayerKind`
  because it changes the computation only, not the weights. All are false without `precision.fp8`.
  """
  precision = cfg.precision
  within = range(precision.fp8_keep_first, cfg.model.num_layers - precision.fp8_keep_last)
  return tuple(
    # A layer that tokens skip sees any number of rows, and matmuls in 8 bits take multiples of 16.
    precision.fp8 and layer in within and not kind.mod
    for layer, kind in enumerate(layer_kinds(cfg))
  )
