"""Averages of the weights, for evaluation and generation."""

import dataclasses
from typing import override

import jax
import jax.numpy as jnp

from ats_jax.model.param import merge, trainable
from ats_jax.step.core import Part, UpdateResult
from ats_jax.step.optimizers.base import Optimizer
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Ema(Part):
  """Keeps an exponential moving average, buffers included (`optimizer.ema_decay`).

  Attributes:
    decay: weight of the average so far.
  """

  decay: float

  @override
  def init(self, state: TrainState) -> TrainState:
    # float32, or a slow average would stop moving; copied, as the state is donated
    average = lambda p: jnp.array(p, p.dtype if _is_code(p) else jnp.float32, copy=True)
    return dataclasses.replace(state, ema=jax.tree.map(average, state.model))

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    del result
    follow = lambda e, p: e + (1.0 - self.decay) * (p.astype(e.dtype) - e)
    step = lambda e, p: e if _is_code(p) else follow(e, p)
    return dataclasses.replace(state, ema=jax.tree.map(step, state.ema, state.model))


def _is_code(array: jax.Array) -> bool:
  """Whether it is of a quantised weight, which is frozen."""
  return jnp.issubdtype(array.dtype, jnp.integer)


@dataclasses.dataclass(frozen=True)
class Averaged(Part):
  """Keeps the weights that the optimizer says are to be used; buffers are those of training.

  Attributes:
    optimizer: which has an `average`.
  """

  optimizer: Optimizer

  @override
  def init(self, state: TrainState) -> TrainState:
    return dataclasses.replace(state, ema=jax.tree.map(jnp.copy, state.model))

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    del result
    assert self.optimizer.average is not None
    weights = self.optimizer.average(trainable(state.model), state.opt_state)
    return dataclasses.replace(state, ema=merge(weights, state.model))
