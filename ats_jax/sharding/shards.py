"""Collectives on shards inside islands, by NCCL or by copies between devices."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import Axes, all_to_all, mesh_axes
from ats_jax.sharding.rules import current_plan


class MatrixSharding(NamedTuple):
  """How a matrix is sharded that is gathered before it is multiplied with.

  Attributes:
    axis: the logical axis of the sharded dimension.
    dim: the sharded dimension: 0 = the inputs, 1 = the outputs.
    keep_gathered: the backward pass uses the matrix that the forward pass gathered.
  """

  axis: str
  dim: int
  keep_gathered: bool


def gather_shards(
  x: jax.Array, axis: str | None, dim: int, excluding: str | None = None
) -> jax.Array:
  """Gather the shards of a weight along a logical axis, and join them along dimension `dim`.

  The derivative is `reduce_scatter_shards`. Uses NCCL's collectives or, by the current plan, copies
  from device to device (`Plan.copy_engines`), which take no SM of a GPU from what runs beside them.

  Args:
    x: this device's shard.
    axis: the logical axis.
    dim: the dimension that is sharded.
    excluding: a logical axis along whose mesh axes nothing is gathered.
  """
  names = _mesh_axes(axis, excluding)
  if not names:
    return x
  if current_plan().copy_engines:
    return _all_gather_copies(x, names, dim)
  return jax.lax.all_gather(x, names, axis=dim, tiled=True)


def gather_weight(x: jax.Array, stored: Axes, used: Axes) -> jax.Array:
  """Gather a shard with logical axes `stored` to the coarser sharding of the axes `used`."""
  for dim, (kept, axis) in enumerate(zip(stored, used, strict=True)):
    x = gather_shards(x, kept, dim, excluding=axis)
  return x


def reduce_scatter_shards(x: jax.Array, axis: str, dim: int) -> jax.Array:
  """Sum gathered weights over the devices along a logical axis, and keep one shard.

  The transpose of `gather_shards`. Copies are summed in float32 and rounded once.
  """
  names = _mesh_axes(axis, None)
  if not names:
    return x
  if current_plan().copy_engines:
    return _reduce_scatter_copies(x, names, dim)
  return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)


def swap_shards(x: jax.Array, axis: str, *, split: int, join: int) -> jax.Array:
  """Reshard from dimension `join` to dimension `split` by an all-to-all.

  As `apply.all_to_all` does it, or by copies (`Plan.copy_engines`). The derivative swaps back.

  Args:
    x: this device's shard.
    axis: the logical axis of the devices.
    split: the dimension to shard.
    join: the dimension that is sharded.
  """
  names = _mesh_axes(axis, None)
  if names and current_plan().copy_engines:
    return _all_to_all_copies(x, names, split, join)
  return all_to_all(x, axis, split=split, join=join)


def _mesh_axes(axis, excluding):
  """The mesh axes of a logical axis that have more than one device."""
  mesh, apart = jax.sharding.get_abstract_mesh().shape, mesh_axes(excluding)
  return tuple(n for n in mesh_axes(axis) if mesh.get(n, 1) > 1 and n not in apart)


def _send_by_distance(x, names, distance):
  """Send to the device `distance` places further, and receive from the one as far before."""
  ways = _num_devices(names)
  return jax.lax.ppermute(x, names, [(i, (i + distance) % ways) for i in range(ways)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather_copies(x, names, dim):
  return _concatenate_copies(lambda _: x, names, dim)


def _reduce_scatter_copies(x, names, dim):
  block = _blocks(x, names, dim)
  sent = [
    _send_by_distance(block(distance), names, distance)
    for distance in range(1, _num_devices(names))
  ]
  total = sum((part.astype(jnp.float32) for part in sent), block(0).astype(jnp.float32))
  return total.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_to_all_copies(x, names, split, join):
  return _concatenate_copies(_blocks(x, names, split), names, join)


def _concatenate_copies(block, names, dim):
  """Send `block(distance)` to the device at each distance; concatenate in the order of devices."""
  # Straight from each device to each other one: a ring would wait for its neighbours.
  ways, here, own = _num_devices(names), jax.lax.axis_index(names), block(0)
  size = own.shape[dim]
  # From far to near is the order of devices, beginning anywhere: XLA fuses the two into one copy.
  blocks = [
    _send_by_distance(block(distance), names, distance) for distance in range(ways - 1, 0, -1)
  ]
  twice = jnp.concatenate([*blocks, own, *blocks], dim)
  return jax.lax.dynamic_slice_in_dim(twice, (ways - 1 - here) * size, ways * size, dim)


def _blocks(x, names, dim):
  """Return a function from a distance to the block of `x` for the device at that distance."""
  ways, here = _num_devices(names), jax.lax.axis_index(names)
  size = x.shape[dim] // ways
  place = lambda distance: (here + distance) % ways * size
  return lambda distance: jax.lax.dynamic_slice_in_dim(x, place(distance), size, dim)


def _num_devices(names):
  return jax.lax.axis_size(names)


_all_gather_copies.defvjp(
  lambda x, names, dim: (_all_gather_copies(x, names, dim), None),
  lambda names, dim, _, dwhole: (_reduce_scatter_copies(dwhole, names, dim),),
)
_all_to_all_copies.defvjp(
  lambda x, names, split, join: (_all_to_all_copies(x, names, split, join), None),
  lambda names, split, join, _, dy: (_all_to_all_copies(dy, names, join, split),),
)
