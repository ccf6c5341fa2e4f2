"""The reflex in the step: bounds gradients, checks the optimizer state, or skips the update."""

import dataclasses
import functools
from typing import Any, override

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.model.param import merge, trainable
from ats_jax.step import tensors
from ats_jax.step.core import Metrics, Part, Update, UpdateResult, without_update
from ats_jax.step.optimizers.base import Optimizer, move, seam
from ats_jax.step.reflex import Control, Reflex, advance, judge
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Guard(Part):
  """Replaces the plain update by one that the reflex judges.

  Attributes:
    cfg: the run, whose schedule may raise the learning rate.
    optimizer: turns gradients into directions.
    is_armed: whether the reflex acts from the start; it measures in any case.
  """

  cfg: Config
  optimizer: Optimizer
  is_armed: bool

  @override
  def init(self, state: TrainState) -> TrainState:
    reflex = Reflex.new(tensors.num_tensors(trainable(state.model)))
    return dataclasses.replace(state, control=Control.new(armed=self.is_armed), reflex=reflex)

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    del inner
    optimizer, platform = self.optimizer, self.optimizer.platform
    control, reflex, opt_state = state.control, state.reflex, state.opt_state
    assert control is not None and reflex is not None, "the state was begun without the part"
    params: Any = trainable(state.model)  # optax has no type for "any pytree"
    loss, grads, lr = seam((loss, grads, lr), platform)
    squares_T = tensors.squares(grads)
    wanted = lr * control.lr_scale
    reflex = reflex.allow_rate(learning_rate(self.cfg, state.step) * control.lr_scale)
    verdict = judge(reflex, control, loss, squares_T, wanted)
    rate = wanted * verdict.rate_scale
    grads = seam(tensors.scaled(grads, verdict.grad_scale), platform)
    used_T = jax.lax.optimization_barrier(jnp.square(verdict.grad_scale) * squares_T)
    miscounted = jnp.zeros(())
    if optimizer.recount is not None:
      counted, miscounted = optimizer.recount(opt_state, reflex.updates)
      opt_state = jax.tree.map(functools.partial(jnp.where, control.armed), counted, opt_state)
    directions, new_state = seam(
      optax.with_extra_args_support(optimizer.tx).update(
        grads,
        opt_state,
        params,
        grad_norm=jnp.sqrt(jnp.sum(used_T)),
        decay_scale=control.decay_scale,
        learning_rate=rate,
      ),
      platform,
    )
    marked = directions
    if optimizer.check is not None:
      checked = optimizer.check(opt_state, directions, new_state, control.armed)
      directions, new_state, marked = seam(tuple(checked), platform)
    moved_T, sums_T = tensors.squares_and_checksums(marked, params, platform)
    is_marked_T = ~jnp.isfinite(moved_T)
    wrong_T = (reflex.knows & (sums_T != reflex.written)) | (is_marked_T & verdict.finite)
    moved = seam(move(params, directions, rate), platform)
    take = functools.partial(jnp.where, verdict.accept)
    moved, new_state = jax.tree.map(take, (moved, new_state), (params, opt_state))
    after = advance(reflex, verdict, loss, squares_T, wanted)
    model = merge(moved, state.model)
    state = dataclasses.replace(state, model=model, opt_state=new_state, reflex=after)
    return state, {
      "reflex/z_loss": verdict.z_loss,
      "reflex/z_grad": jnp.max(verdict.z_grad),
      "reflex/grad_scale": jnp.min(verdict.grad_scale),
      "reflex/shrunk_tensor": jnp.argmin(verdict.grad_scale),
      "reflex/rate_scale": verdict.rate_scale,
      "reflex/skipped": ~verdict.accept,
      "reflex/broken": after.broken,
      "reflex/held": after.held,
      "reflex/wrong": jnp.sum(wrong_T),
      "reflex/wrong_tensor": jnp.argmax(wrong_T),
      "reflex/miscounted": miscounted,
      "train/grad_norm": jnp.sqrt(jnp.sum(squares_T)),
      # Of an update that is not made, what it would have been.
      "train/update_norm": rate * jnp.sqrt(jnp.sum(jnp.where(is_marked_T, 0.0, moved_T))),
      "train/learning_rate": rate,
    }

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    return without_update(result.before, state, result.metrics["reflex/skipped"])

  @override
  def report(
    self, result: UpdateResult, state: TrainState, written: Any
  ) -> tuple[TrainState, Metrics]:
    # The checksums show in the next step whether other code has written to the weights.
    assert state.reflex is not None
    reflex = state.reflex._replace(written=tensors.checksums(written), knows=jnp.asarray(True))
    # The counter before the update, which must be the host's.
    return dataclasses.replace(state, reflex=reflex), {"reflex/step": result.before.step}
