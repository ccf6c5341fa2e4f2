"""Inside islands: shards of weights joined, summed gradients cut again, and rows cut otherwise."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import Axes, exchange, mesh_axes
from ats_jax.sharding.rules import current_plan


class Cut(NamedTuple):
  """How devices share a matrix that each multiplies with as a whole.

  Attributes:
    axis: logical axis of what is cut.
    dim: 0 = the inputs, 1 = the outputs.
    is_kept: reverse mode keeps what was gathered.
  """

  axis: str
  dim: int
  is_kept: bool


def gather_shards(x: jax.Array, axis: str | None, dim: int, but: str | None = None) -> jax.Array:
  """The shards of a weight along a logical axis, joined by dimension `dim`.

  The derivative is `sum_shards`. By NCCL's collectives, or where the plan in use says so by copies
  from device to device (`Plan.copies`), which take no SM of a GPU from what runs beside them.

  Args:
    x: this device's shard.
    axis: the logical axis.
    dim: the dimension that it cuts.
    but: not along the mesh axes of this one.
  """
  names = _names(axis, but)
  if not names:
    return x
  if current_plan().copies:
    return _copied(x, names, dim)
  return jax.lax.all_gather(x, names, axis=dim, tiled=True)


def joined(x: jax.Array, stored: Axes, used: Axes) -> jax.Array:
  """A weight as logical axes `used` cut it, of a shard that the axes `stored` cut further."""
  for dim, (kept, axis) in enumerate(zip(stored, used, strict=True)):
    x = gather_shards(x, kept, dim, but=axis)
  return x


def sum_shards(x: jax.Array, axis: str, dim: int) -> jax.Array:
  """Add up what the devices along a logical axis have for a whole weight, and keep one's own shard.

  The opposite of `gather_shards`. Copies are summed in float32 and rounded once.
  """
  names = _names(axis, None)
  if not names:
    return x
  if current_plan().copies:
    return _sum_of_copies(x, names, dim)
  return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)


def swap_shards(x: jax.Array, axis: str, *, split: int, join: int) -> jax.Array:
  """What is cut along dimension `join`, cut along `split` instead.

  As `apply.exchange` does it, or by copies (`Plan.copies`). The derivative swaps back.

  Args:
    x: this device's shard.
    axis: the logical axis of the devices.
    split: the dimension to cut.
    join: the dimension that is cut.
  """
  names = _names(axis, None)
  if names and current_plan().copies:
    return _swapped(x, names, split, join)
  return exchange(x, axis, split=split, join=join)


def _names(axis, but):
  """The mesh axes of several devices."""
  mesh, apart = jax.sharding.get_abstract_mesh().shape, mesh_axes(but)
  return tuple(n for n in mesh_axes(axis) if mesh.get(n, 1) > 1 and n not in apart)


def _send(x, names, distance):
  """To the device at a distance; from the one that is as far the other way."""
  ways = _ways(names)
  return jax.lax.ppermute(x, names, [(i, (i + distance) % ways) for i in range(ways)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copied(x, names, dim):
  return _joined_copies(lambda _: x, names, dim)


def _sum_of_copies(x, names, dim):
  block = _blocks(x, names, dim)
  sent = [_send(block(distance), names, distance) for distance in range(1, _ways(names))]
  total = sum((part.astype(jnp.float32) for part in sent), block(0).astype(jnp.float32))
  return total.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _swapped(x, names, split, join):
  return _joined_copies(_blocks(x, names, split), names, join)


def _joined_copies(block, names, dim):
  """`block(distance)` of each device for the one at that distance, in the order of devices."""
  # Straight from each device to each other one: a ring would wait for its neighbours.
  ways, here, own = _ways(names), jax.lax.axis_index(names), block(0)
  size = own.shape[dim]
  # From far to near is the order of devices, beginning anywhere: XLA fuses the two into one copy.
  blocks = [_send(block(distance), names, distance) for distance in range(ways - 1, 0, -1)]
  twice = jnp.concatenate([*blocks, own, *blocks], dim)
  return jax.lax.dynamic_slice_in_dim(twice, (ways - 1 - here) * size, ways * size, dim)


def _blocks(x, names, dim):
  """The block of `x` for the device at a distance."""
  ways, here = _ways(names), jax.lax.axis_index(names)
  size = x.shape[dim] // ways
  place = lambda distance: (here + distance) % ways * size
  return lambda distance: jax.lax.dynamic_slice_in_dim(x, place(distance), size, dim)


def _ways(names):
  return jax.lax.axis_size(names)


_copied.defvjp(
  lambda x, names, dim: (_copied(x, names, dim), None),
  lambda names, dim, _, dwhole: (_sum_of_copies(dwhole, names, dim),),
)
_swapped.defvjp(
  lambda x, names, split, join: (_swapped(x, names, split, join), None),
  lambda names, split, join, _, dy: (_swapped(dy, names, join, split),),
)
