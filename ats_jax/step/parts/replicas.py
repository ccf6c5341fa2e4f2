"""Reduces gradients over replicas, large ones in 8 bits (`mesh.compress_gradients`)."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import Param, Role, gradient_shards, is_variable, per_param, trainable
from ats_jax.model.stats import StackStats
from ats_jax.sharding.apply import mesh_axes
from ats_jax.sharding.compressed import sum_over_replicas
from ats_jax.sharding.replicas import map_replicas, num_replicas
from ats_jax.step.core import Gradients, Metrics, Part, Update
from ats_jax.step.objective import Totals
from ats_jax.step.state import TrainState

# Nearly all of the data. Other parameters are small vectors, or routers, which need precision.
COMPRESSED = frozenset({Role.MATRIX, Role.EXPERT, Role.EMBEDDING, Role.HEAD})


def is_compressed(param: Param) -> bool:
  """Whether the gradient of a parameter is compressed: true for matrices, by role."""
  return param.role in COMPRESSED and len(param.axes) > 1


def compresses(cfg: Config) -> bool:
  """Whether a run on the current mesh compresses gradients; with one replica it does not."""
  return cfg.mesh.compress_gradients != "none" and num_replicas() > 1


def zero_unsent(model: Decoder) -> Any:
  """Make the zero `TrainState.unsent` of step 0.

  Returns:
    A tree like `trainable(model)`: for each compressed parameter an array in its dtype, sharded as
    its gradient, with a dimension of replicas after that of the stack; None for others.
  """

  def zeros(param: Param) -> Any:
    if not is_compressed(param):
      return None
    return jax.tree.map(lambda x: _zeros(x, x.ndim - len(param.axes)), param)

  return jax.tree.map(zeros, gradient_shards(trainable(model)), is_leaf=is_variable)


def _zeros(x: jax.Array, dim: int) -> jax.Array:
  (axis,), at = mesh_axes("replica"), lambda entries, new: (*entries[:dim], new, *entries[dim:])
  cut = jax.P(*at(jax.typeof(x).sharding.spec, axis))
  return jnp.zeros(at(x.shape, num_replicas()), x.dtype, out_sharding=cut)


class Replicas(Part):
  """Sums gradients over replicas once, after the last micro-batch.

  Without this part the derivative itself sums over replicas, in each micro-batch.
  """

  @override
  def init(self, state: TrainState) -> TrainState:
    return dataclasses.replace(state, unsent=zero_unsent(state.model))

  @override
  def gradients(
    self,
    inner: Gradients,
    model: Decoder,
    batch: Batch,
    totals: Totals,
    key: jax.Array,
    rules: Pass,
  ) -> tuple[Any, StackStats, Any]:
    # Each replica sums the gradients of its own rows, as `inner` is a sum over rows.
    dims = per_param(lambda param: param.ndim - len(param.axes), trainable(model))
    of_rows = lambda rows, model, totals, key: inner(model, rows, totals, key, rules)
    sums, stats, grads = map_replicas(of_rows, batch, model, totals, key, dims=(0, 0, dims))
    sums, stats = jax.tree.map(lambda x: jnp.sum(x, axis=0), (sums, stats))
    return sums, stats, grads

  @override
  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_variable)
    pairs = list(map(_sum_or_compress, leaves, structure.flatten_up_to(state.unsent)))
    grads, unsent = (structure.unflatten(half) for half in zip(*pairs, strict=True))
    return inner(dataclasses.replace(state, unsent=unsent), grads, lr, loss)


def _sum_or_compress(param: Param, unsent: Param | None) -> tuple[Any, Any]:
  """Sum a gradient over replicas; return the sum and the new unsent part."""
  dim = param.ndim - 1 - len(param.axes)
  if unsent is None:
    return jax.tree.map(lambda x: jnp.sum(x, axis=dim), param), None
  (part,), (owed,) = jax.tree.leaves(param), jax.tree.leaves(unsent)
  total, owed = sum_over_replicas(part, owed, dim)
  return jax.tree.map(lambda _: total, param), jax.tree.map(lambda _: owed, unsent)


def describe_compression(cfg: Config) -> str:
  """Describe for the log how gradients are reduced over replicas."""
  setting, number = f"mesh.compress_gradients={cfg.mesh.compress_gradients}", num_replicas()
  if not compresses(cfg):
    return f"{setting} does nothing: there is one replica"
  return f"{setting}: those of matrices in 8 bits between {number} replicas, once an update"
