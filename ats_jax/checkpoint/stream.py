"""Arrays between the devices and a checkpoint, a part at a time: no second copy on a device."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.checkpoint.layout import Part, of_layer, restore_target

# Device memory of layers that are on their way: out of their stack, or into it.
MOVING_BYTES = 2**30
HOST = "pinned_host"


def to_save(parts: Mapping[str, Part]) -> dict[str, jax.Array]:
  """The arrays to write. Layers of a stack are in host memory: the stack may be donated.

  On a CPU they are views of the stack, which keep JAX from writing to its buffer.
  """
  arrays, moving, moving_bytes = {}, [], 0
  for name, part in parts.items():
    if part.place is None:
      arrays[name] = part.leaf
      continue
    if next(iter(part.leaf.sharding.device_set)).platform == "cpu":
      arrays[name] = _view(part.leaf, part.place)
      continue
    layer = _take(part.leaf, part.place)
    arrays[name] = jax.device_put(layer, layer.sharding.with_memory_kind(HOST))
    moving.append(arrays[name])
    moving_bytes += local_bytes(layer)
    if moving_bytes >= MOVING_BYTES:
      jax.block_until_ready(moving)
      moving, moving_bytes = [], 0
  jax.block_until_ready(moving)
  return arrays


def groups(targets: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, Any]]:
  """Cut arrays to restore into groups that fit beside a state on its devices."""
  group, group_bytes = {}, 0
  for name, target in targets.items():
    size = local_bytes(target)
    if group and group_bytes + size > MOVING_BYTES:
      yield group
      group, group_bytes = {}, 0
    group[name] = target
    group_bytes += size
  if group:
    yield group


def put(leaves: list[Any], parts: Mapping[str, Part], arrays: dict[str, jax.Array]) -> None:
  """Put restored `arrays` where they belong, in place, and let go of them."""
  for name in list(arrays):
    part, array = parts[name], arrays.pop(name)
    if part.place is None:
      leaves[part.number] = array
      continue
    if leaves[part.number] is None:
      leaves[part.number] = zeros(name, part.leaf)
    leaves[part.number] = _put(leaves[part.number], array, part.place)


def zeros(name: str, leaf: Any) -> jax.Array:
  """An array like the abstract `leaf`, where it is to live."""
  target = restore_target(name, leaf)
  return jnp.zeros(target.shape, target.dtype, device=target.sharding)


def local_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Bytes of an array on each of its devices."""
  assert array.sharding is not None
  return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _view(stack: jax.Array, place: int) -> jax.Array:
  layers = [
    jax.device_put(np.asarray(shard.data)[place], shard.device, may_alias=True)
    for shard in stack.addressable_shards
  ]
  sharding = of_layer(stack.sharding)
  return jax.make_array_from_single_device_arrays(stack.shape[1:], sharding, layers)


@jax.jit
def _take(stack: jax.Array, place: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, layer: jax.Array, place: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(stack, layer, place, axis=0)
