"""The scale of the loss, with which gradients in float16 neither vanish nor overflow.

Micikevicius et al. 2018 (arXiv:1710.03740). The scale is a power of two, so that only what would
have been below the smallest number of float16, or above the largest, differs.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from ats_jax.config.schema.precision import Dynamic, LossScaling

LARGEST = 2.0**24  # far from where a float32 loss times the scale overflows itself
# Updates in a row that may be left out: more than halvings from the largest scale to 1. What is not
# finite by then is not so because of the scale.
MOST_SKIPPED = 32


class LossScale(NamedTuple):
  """The scale and what moves it.

  Attributes:
    scale: float32, a power of two, of the next update.
    good: int32, updates since the scale was changed.
    in_a_row: int32, updates in a row, the last included, whose gradients were not finite.
    skipped: int32, updates that were left out since the beginning of the run.
  """

  scale: jax.Array
  good: jax.Array
  in_a_row: jax.Array
  skipped: jax.Array

  @classmethod
  def new(cls, scale: float) -> Self:
    """The first scale, before any update."""
    zero = jnp.zeros((), jnp.int32)
    return cls(jnp.asarray(scale, jnp.float32), zero, zero, zero)

  def overflows(self, norm: jax.Array, loss: jax.Array) -> jax.Array:
    """Whether an update is left out: its gradients are not finite, though its loss is.

    A loss that is not finite is no matter of the scale; neither are gradients that are still not
    finite after `MOST_SKIPPED` updates. These are treated as in a run without a scale.
    """
    return ~jnp.isfinite(norm) & jnp.isfinite(loss) & (self.in_a_row < MOST_SKIPPED)

  def advance(self, how: LossScaling, norm: jax.Array, loss: jax.Array) -> Self:
    """The scale after an update.

    Args:
      how: the settings.
      norm: of the update's gradients.
      loss: of its batch.
    """
    overflows, finite = self.overflows(norm, loss), jnp.isfinite(norm)
    scale, good = self.scale, jnp.where(finite, self.good + 1, 0)
    if isinstance(how, Dynamic):
      lower = jnp.maximum(0.5 * scale, how.least)
      grows = finite & (good >= how.growth_interval)
      higher = jnp.minimum(2.0 * scale, LARGEST)
      scale = jnp.where(overflows, lower, jnp.where(grows, higher, scale))
      good = jnp.where(grows, 0, good)
    return self._replace(
      scale=scale,
      good=good,
      in_a_row=jnp.where(finite, 0, self.in_a_row + 1),
      skipped=self.skipped + overflows,
    )
