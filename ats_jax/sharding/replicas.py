"""Trace a function for the rows of each replica of the weights separately."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ats_jax.sharding.apply import mesh_axes, num_shards
from ats_jax.sharding.rules import isolated_replica


def num_replicas() -> int:
  """The number of copies of the weights on the current mesh."""
  return num_shards("replica")


def map_replicas(
  f: Callable[..., Any], rows: Mapping[str, jax.Array], *args: Any, dims: Any
) -> Any:
  """Compute `f(rows, *args)` for the rows of each replica, without sums over replicas.

  Only the mesh axis of replicas is manual, so sums over the batch in `f` are over the devices of
  one replica. Inside `f`, the current plan has one replica (`rules.isolated_replica`).

  Args:
    f: returns a tree of arrays.
    rows: arrays [micro, batch, ...].
    args: trees of arrays, the same on all replicas.
    dims: where the dimension of replicas is inserted in each result of `f`, a prefix of its tree.

  Returns:
    The results, with a dimension of replicas in each array, which is sharded over them.
  """
  (axis,) = mesh_axes("replica")

  def local(rows, args):
    with isolated_replica():
      made = f(rows, *args)
    expand = lambda dim, tree: jax.tree.map(lambda x: jax.lax.expand_dims(x, (dim,)), tree)
    return jax.tree.map(expand, dims, made)

  at = lambda dim: jax.P(*[None] * dim, axis)
  return jax.shard_map(
    local,
    in_specs=(jax.P(None, axis), jax.P()),
    out_specs=jax.tree.map(at, dims),
    axis_names={axis},
    check_vma=False,  # as of islands, see `apply.island`
  )(dict(rows), args)
