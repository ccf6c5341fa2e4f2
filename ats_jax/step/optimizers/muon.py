"""Muon: orthogonalised momentum for matrices, Adam for all other parameters."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import Muon, MuonH
from ats_jax.model.param import Param, per_param
from ats_jax.ops.newton_schulz import of_unit_norm, orthogonalise
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_tensors
from ats_jax.step.optimizers.base import (
  Checked,
  Optimizer,
  by_role,
  check_elements,
  each,
  relative_rates,
)
from ats_jax.step.optimizers.matrices import for_matrices, matrix_shape

TINY = 1e-30  # in place of 0 as a divisor


class MuonState(NamedTuple):
  """State of `scale_by_muon`.

  Attributes:
    momentum: averages of gradients, a tree like the parameters.
  """

  momentum: Any


def muon(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Muon for matrices, Adam for the rest, with decoupled weight decay.

  Jordan 2024 (kellerjordan.github.io/posts/muon), with the update's size of Liu et al. 2025
  (arXiv:2502.16982), at which rates and decays of AdamW fit.
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, Muon)
  tx = optax.chain(scale_by_muon(o), scale_updates(o))
  return for_matrices(cfg, platform, tx, functools.partial(check_momentum, o.grad_clip))


def muonh(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Muon whose matrices keep their norm, which the learning rate is relative to.

  A matrix W of norm R becomes `W - lr * R * O / |O|`, scaled back to R (the hyperball update that
  github.com/marin-community/marin, issue 5763, adopted).
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, MuonH)
  tx = optax.chain(scale_by_muon(o), keep_norms(cfg))
  check = functools.partial(check_momentum, o.grad_clip)
  return for_matrices(cfg, platform, tx, check, decays=False)


def scale_by_muon(settings: Muon | MuonH) -> optax.GradientTransformation:
  """Directions of matrices: momentum with singular values of 1, and of the size that is asked for.

  Each matrix of stacked layers and experts is orthogonalised by itself, on one device.
  """
  beta = by_role(settings.momentum_by_role, settings.momentum)

  def init(params):
    return MuonState(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))

  def update(updates, state, params=None):
    del params
    average = lambda m, g, beta: beta * m + (1.0 - beta) * g.astype(jnp.float32)
    betas = each(beta, updates)
    momentum = jax.tree.map(average, state.momentum, updates, betas)
    ahead = jax.tree.map(average, momentum, updates, betas) if settings.nesterov else momentum
    return per_param(functools.partial(_direction, settings), ahead), MuonState(momentum)

  return optax.GradientTransformation(init, update)


def _direction(settings: Muon | MuonH, param: Param) -> jax.Array:
  rows, columns = matrix_shape(param)

  def of_block(x: jax.Array) -> tuple[jax.Array]:
    y = orthogonalise(x.reshape(-1, rows, columns), steps=settings.iterations)
    return (y.reshape(x.shape),)

  # Norms are taken, and numbers rounded, before devices exchange them.
  unit = of_unit_norm(
    param[...], param.num_stacked, eps=settings.norm_eps, dtype=jnp.dtype(settings.iteration_dtype)
  )
  (direction,) = map_tensors(of_block, param.num_stacked, unit)
  return direction.astype(jnp.float32)


def scale_updates(settings: Muon) -> optax.GradientTransformation:
  """Give orthogonal directions the size that the settings ask for.

  An orthogonal matrix has a root mean square of 1 / sqrt(its larger side).
  """

  def factor(param: Param) -> float:
    inputs, outputs = matrix_shape(param)
    if settings.update_size == "rms":
      return settings.update_rms * math.sqrt(max(inputs, outputs))
    assert settings.update_size == "spectral"
    return math.sqrt(outputs / inputs)

  return optax.stateless(
    lambda updates, params: jax.tree.map(lambda d, f: f * d, updates, per_param(factor, updates))
  )


def keep_norms(cfg: Config) -> optax.GradientTransformationExtraArgs:
  """Replace directions by those that turn each matrix by the learning rate, and keep its norm.

  `update` needs the parameters and the `learning_rate`.
  """

  def update(updates, state, params=None, *, learning_rate: jax.Array | float = 1.0, **_):
    def one(direction: jax.Array, param: jax.Array, num_stacked: int, rate: float) -> jax.Array:
      tensor = tuple(range(num_stacked, param.ndim))
      norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=tensor, keepdims=True))
      old, lr = param.astype(jnp.float32), jnp.maximum(rate * learning_rate, TINY)
      length = norm(old)
      turned = old - lr * length * direction / jnp.maximum(norm(direction), TINY)
      return (old - turned * (length / jnp.maximum(norm(turned), TINY))) / lr

    stacked = per_param(lambda param: param.num_stacked, params)
    rates = relative_rates(cfg, params)
    return jax.tree.map(one, updates, params, stacked, rates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def check_momentum(
  most: float,
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
) -> Checked:
  """What holds of an average of gradients that were clipped to the norm `most` (0 = any).

  No element is larger. One that is makes all directions of its matrix wrong.
  """
  bound = most * (1.0 + 1e-3) if most else jnp.inf

  def is_wrong(state: MuonState, zero: jax.Array) -> Any:
    return jax.tree.map(lambda m: ~(jnp.abs(m) + zero <= bound) | jnp.isinf(m), state.momentum)

  def spread(wrong: Param) -> jax.Array:
    dims = tuple(range(wrong.num_stacked, wrong.ndim))
    return jnp.broadcast_to(jnp.any(wrong[...], axis=dims, keepdims=True), wrong.shape)

  return check_elements(
    MuonState, ("momentum",), is_wrong, before, directions, after, armed, spread
  )
