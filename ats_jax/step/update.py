"""From gradients to new parameters: plainly, or guarded by the reflex."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.step import tensors
from ats_jax.step.optimizers.base import Optimizer, move, seam
from ats_jax.step.reflex import Control, Reflex, advance, judge


class Updated(NamedTuple):
  """What an update leaves behind.

  Attributes:
    params: new parameters; the old ones if the update is not made.
    opt_state: of the optimizer, likewise.
    grad_norm: float32, before clipping.
    update_norm: float32, of what is added to the parameters if the update is made.
    rate: float32, the factor of the directions if the update is made: the schedule's learning rate
      times the factors of supervisor and reflex.
    accept: bool, whether the update is made; None = yes.
    reflex: its new state, or None.
    report: values of `REFLEX_METRICS`; empty without reflex.
  """

  params: Any
  opt_state: optax.OptState
  grad_norm: jax.Array
  update_norm: jax.Array
  rate: jax.Array
  accept: jax.Array | None = None
  reflex: Reflex | None = None
  report: tuple[jax.Array, ...] = ()


def update(
  optimizer: Optimizer,
  params: Any,
  grads: Any,
  opt_state: optax.OptState,
  lr: jax.Array,
) -> Updated:
  """Move the parameters, in one pass where the optimizer has one.

  Args:
    optimizer: what makes directions of gradients.
    params: trainable parameters.
    grads: like them.
    opt_state: of the optimizer.
    lr: learning rate of the schedule, scalar.
  """
  platform = optimizer.platform
  grads, lr = seam((grads, lr), platform)
  if optimizer.fused is not None:
    moved = optimizer.fused(params, grads, opt_state, lr)
    return Updated(moved.params, moved.opt_state, tensors.norm(grads), moved.update_norm, lr)
  directions, opt_state = seam(optimizer.tx.update(grads, opt_state, params), platform)
  moved = seam(move(params, directions, lr), platform)
  return Updated(moved, opt_state, tensors.norm(grads), lr * tensors.norm(directions), lr)


def guarded_update(
  optimizer: Optimizer,
  params: Any,
  grads: Any,
  opt_state: optax.OptState,
  lr: jax.Array,
  loss: jax.Array,
  control: Control,
  reflex: Reflex,
) -> Updated:
  """`update` with the reflex: bounded influence, a sound state of the optimizer, or no update.

  Args:
    optimizer: what makes directions of gradients.
    params: trainable parameters.
    grads: like them.
    opt_state: of the optimizer.
    lr: learning rate of the schedule, scalar.
    loss: cross entropy per token of the batch.
    control: what the supervisor set.
    reflex: of the steps before.
  """
  platform = optimizer.platform
  loss, grads, lr = seam((loss, grads, lr), platform)
  squares_T = tensors.squares(grads)
  wanted = lr * control.lr_scale
  verdict = judge(reflex, control, loss, squares_T, wanted)
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
    ),
    platform,
  )
  marked = directions
  if optimizer.check is not None:
    directions, new_state, marked = optimizer.check(opt_state, directions, new_state, control.armed)
    directions, new_state, marked = seam((directions, new_state, marked), platform)
  moved_T, sums_T = tensors.squares_and_checksums(marked, params, platform)
  is_marked_T = ~jnp.isfinite(moved_T)
  wrong_T = (reflex.knows & (sums_T != reflex.written)) | (is_marked_T & verdict.finite)
  rate = wanted * verdict.rate_scale
  moved = seam(move(params, directions, rate), platform)
  take = functools.partial(jnp.where, verdict.accept)
  moved, new_state = jax.tree.map(take, (moved, new_state), (params, opt_state))
  after = advance(reflex, verdict, loss, squares_T, wanted)
  report = (
    verdict.z_loss,
    jnp.max(verdict.z_grad),
    jnp.min(verdict.grad_scale),
    jnp.argmin(verdict.grad_scale),
    verdict.rate_scale,
    ~verdict.accept,
    after.bucket,
    after.cusum,
    after.broken,
    after.held,
    jnp.sum(wrong_T),
    jnp.argmax(wrong_T),
    miscounted,
  )
  update_norm = rate * jnp.sqrt(jnp.sum(jnp.where(is_marked_T, 0.0, moved_T)))
  grad_norm = jnp.sqrt(jnp.sum(squares_T))
  return Updated(moved, new_state, grad_norm, update_norm, rate, verdict.accept, after, report)
