"""Scales the loss, so that gradients in float16 neither vanish nor overflow (arXiv:1710.03740)."""

import dataclasses
import functools
from typing import Any, NamedTuple, Self, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema.precision import Dynamic, LossScaling
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import merge, trainable
from ats_jax.model.stats import StackStats
from ats_jax.step import tensors
from ats_jax.step.core import Gradients, Metrics, Part, Update, UpdateResult, without_update
from ats_jax.step.objective import Totals
from ats_jax.step.state import TrainState

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


@dataclasses.dataclass(frozen=True)
class Scaled(Part):
  """Differentiates the loss times the scale, and leaves out updates whose gradients overflow.

  The objective's own gradients are in float16 up to the weights, which are float32. Divided by the
  scale in float32, they are summed over replicas, bounded by the reflex and clipped as always. For
  the parts inside, an update that is left out has gradients of zero, so that no part takes it for
  a fault; nothing that they make of it stays.

  Attributes:
    how: the settings.
  """

  how: LossScaling

  @override
  def init(self, state: TrainState) -> TrainState:
    return dataclasses.replace(state, loss_scale=LossScale.new(self.how.first))

  @override
  def used_totals(self, state: TrainState, totals: Totals) -> Totals:
    assert state.loss_scale is not None, "the state was begun without the part"
    return totals._replace(scale=state.loss_scale.scale)

  @override
  def gradients(
    self,
    inner: Gradients,
    model: Decoder,
    batch: Batch,
    totals: Totals,
    key: jax.Array,
    rules: Pass,
  ) -> tuple[Any, StackStats, Any]:
    sums, stats, grads = inner(model, batch, totals, key, rules)
    assert totals.scale is not None
    smaller = 1.0 / totals.scale  # exact: it is a power of two
    return sums, stats, jax.tree.map(lambda g: g.astype(jnp.float32) * smaller, grads)

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    before = state.loss_scale
    assert before is not None
    norm = tensors.norm(grads)
    skips, after = before.overflows(norm, loss), before.advance(self.how, norm, loss)
    calm = jax.tree.map(lambda g: jnp.where(skips, 0.0, g), grads)
    moved, metrics = inner(state, calm, lr, loss)
    take = functools.partial(jnp.where, skips)
    of = lambda s: (trainable(s.model), s.opt_state, s.reflex)
    kept, opt_state, reflex = jax.tree.map(take, of(state), of(moved))
    model = merge(kept, moved.model)
    state = dataclasses.replace(
      moved, model=model, opt_state=opt_state, reflex=reflex, loss_scale=after
    )
    return state, metrics | {
      "train/grad_norm": norm,
      "loss_scale/scale": before.scale,
      "loss_scale/change": after.scale / before.scale,
      "loss_scale/skipped": skips,
      "loss_scale/skipped_updates": after.skipped,
    }

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    return without_update(result.before, state, result.metrics["loss_scale/skipped"])
