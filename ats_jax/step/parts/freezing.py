"""Keeps weights of some roles or layers while a phase lasts (`Phase.trains`, `Phase.layers`)."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.config.schema.finetune import is_within
from ats_jax.model.layout import place_of
from ats_jax.model.param import Param, is_variable, merge, params_of, role_name, trainable
from ats_jax.step.core import Metrics, Part, Update
from ats_jax.step.optimizers.base import Optimizer
from ats_jax.step.schedule import phase_starts
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Freezing(Part):
  """Puts back weights that a phase does not train.

  Their gradients and moments go on, so that they begin to move as if they always had, and norms,
  clipping and the reflex are as usual.

  Attributes:
    cfg: the resolved config, with the phases.
    optimizer: the optimizer of the run.
  """

  cfg: Config
  optimizer: Optimizer

  @override
  def init(self, state: TrainState) -> TrainState:
    """Look whether each phase trains something; the state stays as it is.

    Raises:
      ValueError: if one names a role that does not train, or the optimizer averages its weights.
    """
    there = sorted({role_name(param) for param in params_of(state.model)})
    for number, phase in enumerate(self.cfg.data.phases):
      if missing := sorted({*phase.trains} - {*there}):
        raise ValueError(
          f"data.phases[{number}].trains: this run trains no parameters of the role "
          f"{missing[0]!r}, only of {', '.join(there)}."
        )
    if self.optimizer.average is not None:
      raise ValueError(
        f"data.phases: trains with optimizer.name={self.cfg.optimizer.name}, whose averages would "
        "move on. Use another optimizer, or the same roles in all phases."
      )
    return state

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    after, metrics = inner(state, grads, lr, loss)
    old: Any = trainable(state.model)
    phases, starts = self.cfg.data.phases, jnp.array(phase_starts(self.cfg), jnp.int32)
    at = jnp.sum(starts <= state.step) - 1

    def one(path: Any, new: Param, kept: Param) -> Param:
      role, found = role_name(new), place_of(path)
      layers = state.model.layout[found[0]].layer_indices(found[1]) if found else None
      table = []
      for phase in phases:
        of_role = not phase.trains or role in phase.trains
        of_layers = [of_role and is_within(phase.layers, n) for n in layers or ()]
        table.append(of_layers if layers else of_role)
      moves = jnp.array(table)[at]  # of each layer of a stack
      pick = lambda a, b: jnp.where(jnp.expand_dims(moves, (*range(moves.ndim, a.ndim),)), a, b)
      return jax.tree.map(pick, new, kept)

    models = trainable(after.model), old
    params = jax.tree_util.tree_map_with_path(one, *models, is_leaf=is_variable)
    return dataclasses.replace(after, model=merge(params, after.model)), metrics
