"""ZeRO stages 1 and 2: each device updates the shards whose moments it holds (`mesh.zero`)."""

import dataclasses
from typing import Any, override

import jax

from ats_jax.model.param import reshard_params
from ats_jax.step.core import Metrics, Part, Update
from ats_jax.step.state import TrainState


class Shards(Part):
  """Updates in the sharding of the moments, then gathers the parameters to that of the weights."""

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    state = dataclasses.replace(state, model=reshard_params("moments", state.model))
    state, metrics = inner(state, reshard_params("moments", grads), lr, loss)
    return dataclasses.replace(state, model=reshard_params("weights", state.model)), metrics
