"""An exponential moving average of the weights (`optimizer.ema_decay`)."""

import dataclasses
from typing import override

import jax
import jax.numpy as jnp

from ats_jax.step.core import Part, UpdateResult
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Ema(Part):
  """Keeps the average, buffers included, which evaluation and generation use.

  Attributes:
    decay: weight of the average so far.
  """

  decay: float

  @override
  def init(self, state: TrainState) -> TrainState:
    # float32, or a slow average would stop moving; copied, as the state is donated
    average = lambda p: jnp.array(p, jnp.float32, copy=True)
    return dataclasses.replace(state, ema=jax.tree.map(average, state.model))

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    del result
    follow = lambda e, p: e + (1.0 - self.decay) * (p.astype(e.dtype) - e)
    return dataclasses.replace(state, ema=jax.tree.map(follow, state.ema, state.model))
