"""Shards of weights inside islands: joined to compute with, and summed gradients cut again."""

import functools

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import Axes, mesh_axes
from ats_jax.sharding.rules import current_plan


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


def _names(axis, but):
  """The mesh axes of several devices."""
  mesh, apart = jax.sharding.get_abstract_mesh().shape, mesh_axes(but)
  return tuple(n for n in mesh_axes(axis) if mesh.get(n, 1) > 1 and n not in apart)


def _send(x, names, distance):
  """To the device at a distance; from the one that is as far the other way."""
  ways = jax.lax.axis_size(names)
  return jax.lax.ppermute(x, names, [(i, (i + distance) % ways) for i in range(ways)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copied(x, names, dim):
  # Straight from each device to each other one: a ring would wait for its neighbours.
  ways, here, size = jax.lax.axis_size(names), jax.lax.axis_index(names), x.shape[dim]
  # From far to near is the order of devices, beginning anywhere: XLA fuses the two into one copy.
  blocks = [_send(x, names, distance) for distance in range(ways - 1, 0, -1)]
  twice = jnp.concatenate([*blocks, x, *blocks], dim)
  return jax.lax.dynamic_slice_in_dim(twice, (ways - 1 - here) * size, ways * size, dim)


def _sum_of_copies(x, names, dim):
  ways, here = jax.lax.axis_size(names), jax.lax.axis_index(names)
  size = x.shape[dim] // ways

  def block(distance):
    place = (here + distance) % ways * size
    return jax.lax.dynamic_slice_in_dim(x, place, size, dim)

  sent = [_send(block(distance), names, distance) for distance in range(1, ways)]
  total = sum((part.astype(jnp.float32) for part in sent), block(0).astype(jnp.float32))
  return total.astype(x.dtype)


_copied.defvjp(
  lambda x, names, dim: (_copied(x, names, dim), None),
  lambda names, dim, _, dwhole: (_sum_of_copies(dwhole, names, dim),),
)
