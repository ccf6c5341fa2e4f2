"""From gradients to new parameters: plainly, or guarded by the reflex."""

import functools
from typing import Any, NamedTuple

import jax
import optax

from ats_jax.step.optimizers.base import Optimizer, move, norm, seam
from ats_jax.step.reflex import Control, Reflex, advance, govern, judge


class Updated(NamedTuple):
  """What an update leaves behind.

  Attributes:
    params: new parameters.
    opt_state: new state of the optimizer.
    grad_norm: float32, before clipping.
    update_norm: float32, of what was added to the parameters, were it accepted.
    rate: float32, what multiplied the directions, were it accepted: the schedule's learning rate
      times all that anybody made of it.
    accept: bool, whether to keep this; None = yes.
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
    return Updated(moved.params, moved.opt_state, norm(grads), moved.update_norm, lr)
  directions, opt_state = seam(optimizer.tx.update(grads, opt_state, params), platform)
  moved = seam(move(params, directions, lr), platform)
  return Updated(moved, opt_state, norm(grads), lr * norm(directions), lr)


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
  """`update` with the reflex: it may shrink the gradient or the update, or reject the whole.

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
  grad_norm = norm(grads)
  verdict = judge(reflex, control, loss, grad_norm)
  grads = seam(scaled(grads, verdict.grad_scale), platform)
  make = functools.partial(
    optax.with_extra_args_support(optimizer.tx).update,
    params=params,
    grad_norm=verdict.grad_scale * grad_norm,
    decay_scale=control.decay_scale,
  )
  directions, new_state = seam(make(grads, opt_state), platform)
  # Over the learning rate: a change of it that somebody decided is no surprise.
  size = norm(directions)
  scale, z_update = govern(reflex, control, size)
  rate = lr * control.lr_scale * scale
  if platform == "gpu":
    # Made once more, of what XLA does not know to be the same: it would keep the directions, in
    # float32, from the pass that measures them to the one that needs the outcome.
    directions, new_state = make(grads, jax.lax.optimization_barrier(opt_state))
  moved = seam(move(params, directions, rate), platform)
  after = advance(reflex, verdict, loss, grad_norm, size, scale)
  report = (
    verdict.z_loss,
    verdict.z_grad,
    z_update,
    verdict.grad_scale,
    scale,
    ~verdict.accept,
    after.bucket,
    after.cusum,
    after.broken,
    after.held,
  )
  return Updated(moved, new_state, grad_norm, rate * size, rate, verdict.accept, after, report)


def scaled(tree: Any, factor: jax.Array) -> Any:
  """Every leaf times a scalar, in the leaf's dtype."""
  return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)
