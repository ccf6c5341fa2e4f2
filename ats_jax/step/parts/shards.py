"""An update in shards: each device updates what it has the moments of (`mesh.zero`)."""

import dataclasses
from typing import Any, override

import jax

from ats_jax.model.param import cut_as
from ats_jax.step.core import Metrics, Part, Update
from ats_jax.step.state import TrainState


class Shards(Part):
  """Shards parameters and gradients as moments are, and parameters as weights are afterwards."""

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    state = dataclasses.replace(state, model=cut_as("moments", state.model))
    state, metrics = inner(state, cut_as("moments", grads), lr, loss)
    return dataclasses.replace(state, model=cut_as("weights", state.model)), metrics
