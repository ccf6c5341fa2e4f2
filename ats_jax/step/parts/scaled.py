"""Trains with a scaled loss, and leaves out updates whose gradients overflow."""

import dataclasses
import functools
from typing import Any, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema.precision import LossScaling
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import merge, trainable
from ats_jax.model.stats import StackStats
from ats_jax.step import tensors
from ats_jax.step.core import Gradients, Metrics, Part, Update, UpdateResult, without_update
from ats_jax.step.loss_scale import LossScale
from ats_jax.step.objective import Totals
from ats_jax.step.state import TrainState


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
      "train/loss_scale": before.scale,
      "train/loss_scale_change": after.scale / before.scale,
      "train/skipped": skips,
      "train/skipped_updates": after.skipped,
    }

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    return without_update(result.before, state, result.metrics["train/skipped"])
