"""Gradients of replicas to those of the batch; large ones in 8 bits (`mesh.compress_gradients`)."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.param import Param, Role, is_variable, per_param, shards_of_gradients, trainable
from ats_jax.model.stats import StackStats
from ats_jax.sharding.apply import mesh_axes
from ats_jax.sharding.compressed import sum_over_replicas
from ats_jax.sharding.replicas import each, num_replicas
from ats_jax.step.core import Gradients, Metrics, Part, Update
from ats_jax.step.objective import Totals
from ats_jax.step.state import TrainState

# Nearly all that is sent. The others are vectors, or steer which way a token goes.
COMPRESSED = frozenset({Role.MATRIX, Role.EXPERT, Role.EMBEDDING, Role.HEAD})


def is_compressed(param: Param) -> bool:
  """Whether the gradient of a parameter goes in 8 bits where gradients do: matrices, by role."""
  return param.role in COMPRESSED and len(param.axes) > 1


def compresses(cfg: Config) -> bool:
  """Whether a run on the current mesh compresses gradients: it does not with a single replica."""
  return cfg.mesh.compress_gradients != "none" and num_replicas() > 1


def nothing_unsent(model: Decoder) -> Any:
  """`TrainState.unsent` of step 0, zeros.

  Returns:
    A tree like `trainable(model)`: for each array that is compressed one in its dtype, sharded as
    its gradient is, with a dimension of replicas behind that of a stack. None for others.
  """

  def zeros(param: Param) -> Any:
    if not is_compressed(param):
      return None
    return jax.tree.map(lambda x: _zeros(x, x.ndim - len(param.axes)), param)

  return jax.tree.map(zeros, shards_of_gradients(trainable(model)), is_leaf=is_variable)


def _zeros(x: jax.Array, dim: int) -> jax.Array:
  (axis,), at = mesh_axes("replica"), lambda entries, new: (*entries[:dim], new, *entries[dim:])
  cut = jax.P(*at(jax.typeof(x).sharding.spec, axis))
  return jnp.zeros(at(x.shape, num_replicas()), x.dtype, out_sharding=cut)


class Replicas(Part):
  """One reduction of gradients, behind the last micro-batch.

  Without it the derivative itself sums over replicas, in each micro-batch.
  """

  @override
  def init(self, state: TrainState) -> TrainState:
    return dataclasses.replace(state, unsent=nothing_unsent(state.model))

  def gradients(
    self, inner: Gradients, model: Decoder, batch: Batch, whole: Totals, key: jax.Array, rules: Pass
  ) -> tuple[Any, StackStats, Any]:
    """See `Part`; each replica adds up the gradients of its own rows, in a dimension of replicas.

    `inner` is linear in rows: what it makes of some and of others adds up.
    """
    dims = per_param(lambda param: param.ndim - len(param.axes), trainable(model))
    of_rows = lambda rows, model, whole, key: inner(model, rows, whole, key, rules)
    sums, stats, grads = each(of_rows, batch, model, whole, key, dims=(0, 0, dims))
    sums, stats = jax.tree.map(lambda x: jnp.sum(x, axis=0), (sums, stats))
    return sums, stats, grads

  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    """See `Part`; sums the gradients over replicas before the update."""
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_variable)
    pairs = list(map(_summed, leaves, structure.flatten_up_to(state.unsent)))
    grads, unsent = (structure.unflatten(half) for half in zip(*pairs, strict=True))
    return inner(dataclasses.replace(state, unsent=unsent), grads, lr, loss)


def _summed(param: Param, unsent: Param | None) -> tuple[Any, Any]:
  """A gradient over replicas, and what is unsent of it."""
  dim = param.ndim - 1 - len(param.axes)
  if unsent is None:
    return jax.tree.map(lambda x: jnp.sum(x, axis=dim), param), None
  (part,), (owed,) = jax.tree.leaves(param), jax.tree.leaves(unsent)
  total, owed = sum_over_replicas(part, owed, dim)
  return jax.tree.map(lambda _: total, param), jax.tree.map(lambda _: owed, unsent)


def in_words(cfg: Config) -> str:
  """How gradients are reduced over replicas, for the log."""
  setting, number = f"mesh.compress_gradients={cfg.mesh.compress_gradients}", num_replicas()
  if not compresses(cfg):
    return f"{setting} does nothing: there is one replica"
  return f"{setting}: those of matrices in 8 bits between {number} replicas, once an update"
