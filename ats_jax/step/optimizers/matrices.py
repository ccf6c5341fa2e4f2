"""Optimizers that treat matrices in one way, and all other parameters by Adam."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import ForMatrices
from ats_jax.model.param import Param, per_param
from ats_jax.step.optimizers.adamw import betas_of, check_moments, scale_by_adam, within_bound
from ats_jax.step.optimizers.base import (
  Check,
  Checked,
  Optimizer,
  clipping,
  decoupled_decay,
  recount,
  role_name,
)


def for_matrices(
  cfg: Config,
  platform: str,
  of_matrices: optax.GradientTransformation,
  check: Check | None = None,
  *,
  decays: bool = True,
) -> Optimizer:
  """An optimizer with a transformation of its own for the matrices of `optimizer.matrix_roles`.

  Gradients are clipped together before, and directions decay behind.

  Args:
    cfg: the resolved config.
    platform: where it runs.
    of_matrices: gradients of matrices to directions.
    check: see `Optimizer.check`, of its state.
    decays: whether the matrices decay.
  """
  o = cfg.optimizer
  assert isinstance(o, ForMatrices)
  b1, b2 = betas_of(o)
  float32 = jnp.dtype("float32")
  adam = scale_by_adam(b1, b2, o.eps, float32, float32)
  labels = functools.partial(per_param, lambda p: "matrices" if is_matrix(o, p) else "rest")
  parts = optax.partition({"matrices": of_matrices, "rest": adam}, labels)
  decay = decoupled_decay(cfg, lambda param: decays or not is_matrix(o, param))
  checks = (functools.partial(check_moments, b1=b1, b2=b2), *([check] if check else []))
  return Optimizer(
    optax.chain(*clipping(cfg, platform), parts, *decay),
    platform,
    recount=recount,
    check=functools.partial(_check_all, checks),
    refit=functools.partial(within_bound, b1=b1, b2=b2),
  )


def is_matrix(settings: ForMatrices, param: Param) -> bool:
  """Whether a parameter is one of the matrices that `optimizer.matrix_roles` names."""
  has_two_sides = param.num_stacked < param.ndim - 1
  return has_two_sides and role_name(param) in settings.matrix_roles


def matrix_shape(param: Param) -> tuple[int, int]:
  """Rows (inputs) and columns (outputs) of each matrix of a parameter."""
  tensor = param.shape[param.num_stacked :]
  return math.prod(tensor[: param.num_inputs]), math.prod(tensor[param.num_inputs :])


def _check_all(
  checks: tuple[Check, ...],
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
) -> Checked:
  """Several checks, each of the parameters of one link."""
  marked = directions
  for check in checks:
    directions, after, marks = check(before, directions, after, armed)
    marked = jax.tree.map(lambda m, new: jnp.where(jnp.isnan(new), new, m), marked, marks)
  return Checked(directions, after, marked)
