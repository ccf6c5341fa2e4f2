"""Resets the moments where a phase of a mixture begins (`optimizer.phase_moments`)."""

import dataclasses
import functools
from typing import Any, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.param import reshard_params, trainable
from ats_jax.step.core import Metrics, Part, Update
from ats_jax.step.optimizers.base import Optimizer
from ats_jax.step.schedule import phase_starts
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Phases(Part):
  """Resets the optimizer state at the first update of each phase.

  Attributes:
    cfg: the resolved config, with the phases.
    optimizer: the optimizer whose state is reset.
  """

  cfg: Config
  optimizer: Optimizer

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    return inner(renew_moments(self.cfg, self.optimizer, state, state.step), grads, lr, loss)


def renew_moments(
  cfg: Config, optimizer: Optimizer, state: TrainState, since: jax.Array | int
) -> TrainState:
  """Reset the optimizer state to that of step 0 if a phase begins in [since, state.step].

  The reflex counts updates as the optimizer does, so its count begins anew too.

  Args:
    cfg: the resolved config, with the phases.
    optimizer: the optimizer of the state.
    state: a traced state.
    since: int32 scalar, 0-based; `state.step` for the update that is about to be made.
  """
  starts = jnp.array(phase_starts(cfg)[1:], jnp.int32)
  begins = jnp.any((since <= starts) & (starts <= state.step))
  take = functools.partial(jnp.where, begins)
  params = reshard_params("moments", trainable(state.model))
  opt_state = jax.tree.map(take, optimizer.tx.init(params), state.opt_state)
  reflex = state.reflex
  if reflex is not None:
    reflex = reflex._replace(updates=take(0, reflex.updates))
  return dataclasses.replace(state, opt_state=opt_state, reflex=reflex)
