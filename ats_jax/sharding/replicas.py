"""What each replica of the weights makes of its own rows, kept apart."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ats_jax.sharding.apply import mesh_axes, num_shards
from ats_jax.sharding.rules import own_rows


def num_replicas() -> int:
  """How many copies of the weights the current mesh has along its axis of replicas."""
  return num_shards("replica")


def each(f: Callable[..., Any], rows: Mapping[str, jax.Array], *args: Any, dims: Any) -> Any:
  """`f(rows, *args)` of each replica's rows.

  Manual over the axis of replicas alone: what `f` sums over the batch is summed over the devices of
  a replica. Inside, the plan in use has no other replicas (`rules.own_rows`), and other mesh axes
  are explicit as ever.

  Args:
    f: gives a tree of arrays.
    rows: arrays [micro, batch, ...].
    args: trees of arrays, the same on all replicas.
    dims: the place of a new dimension in each array that `f` gives: a prefix of that tree.

  Returns:
    The results, with a dimension of replicas in each array, which is sharded over them.
  """
  (axis,) = mesh_axes("replica")

  def local(rows, args):
    with own_rows():
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
