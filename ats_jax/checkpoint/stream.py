"""Arrays between the devices and a checkpoint, a part at a time: no second copy on a device."""

import collections
import concurrent.futures
import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.checkpoint.layout import StoredArray, of_layer, restore_target

# Device memory of layers that are on their way: out of their stack, or into it.
MOVING_BYTES = 2**30
HOST = "pinned_host"
COPIERS = 8  # threads that copy a layer from pinned memory
COPIED_BYTES = 2**26  # that each copies at a time


class UncopiedArray(np.ndarray):
  """An array that is not written to during a save, so Orbax need not deep-copy it."""

  def __deepcopy__(self, memo: Any) -> Self:
    return self


def to_save(parts: Mapping[str, StoredArray]) -> dict[str, jax.Array | np.ndarray]:
  """The arrays to write, in host memory: the state may be donated.

  On a CPU they are views of the state, which keep JAX from writing to its buffers.
  """
  arrays, on_gpu = dict[str, jax.Array | np.ndarray](), {}
  for name, part in parts.items():
    if isinstance(part.leaf, np.ndarray):
      arrays[name] = part.leaf if part.layer is None else part.leaf[part.layer, ...]
      continue
    devices = part.leaf.sharding.device_set
    on_cpu = next(iter(devices)).platform == "cpu"
    if jnp.issubdtype(part.leaf.dtype, jax.dtypes.prng_key):
      arrays[name] = part.leaf
    elif len(devices) == 1 and on_cpu:
      full_array = np.asarray(part.leaf)
      arrays[name] = (full_array if part.layer is None else full_array[part.layer, ...]).view(
        UncopiedArray
      )
    elif len(devices) == 1:
      on_gpu[name] = part
    elif part.layer is None:
      arrays[name] = part.leaf
    else:
      arrays[name] = _view(part.leaf, part.layer) if on_cpu else _pinned(part.leaf, part.layer)
  return arrays | {name: array.view(UncopiedArray) for name, array in fetch(on_gpu).items()}


def fetch(parts: Mapping[str, StoredArray]) -> dict[str, np.ndarray]:
  """Copy arrays of one device to host memory.

  A device is fast at writing to pinned memory only, and pinning memory takes longer than the copy.
  So a small pinned pool is used over and over, and threads empty it into pageable memory.
  """
  arrays, waiting, moving_bytes = {}, collections.deque(), 0
  with concurrent.futures.ThreadPoolExecutor(COPIERS, "save") as pool:
    for name, part in parts.items():
      layer = part.leaf if part.layer is None else _layer_of(part.leaf, part.layer)
      arrays[name] = np.empty(layer.shape, layer.dtype)
      pinned = jax.device_put(layer, layer.sharding.with_memory_kind(HOST))
      for start in range(0, layer.nbytes, COPIED_BYTES):
        waiting.append(pool.submit(_copy, pinned, arrays[name], slice(start, start + COPIED_BYTES)))
        moving_bytes += min(COPIED_BYTES, layer.nbytes - start)
      while moving_bytes > MOVING_BYTES:
        moving_bytes -= waiting.popleft().result()
    for copied in waiting:
      copied.result()
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


def put(leaves: list[Any], parts: Mapping[str, StoredArray], arrays: dict[str, jax.Array]) -> None:
  """Write restored `arrays` into `leaves`, layers in place; empties `arrays`.

  Where an abstract leaf has a function `convert`, its result is written, a tree of arrays.
  """
  for name in list(arrays):
    part, array = parts[name], arrays.pop(name)
    convert = getattr(part.leaf, "convert", None)
    tree = array if convert is None else convert(array)
    if part.layer is None:
      leaves[part.number] = tree
      continue
    if leaves[part.number] is None and convert is None:
      leaves[part.number] = zeros(name, part.leaf)
    elif leaves[part.number] is None:
      leaves[part.number] = jax.tree.map(functools.partial(_stack, part.leaf.shape[0]), tree)
    put_layer = functools.partial(_put_layer, place=part.layer)
    leaves[part.number] = jax.tree.map(put_layer, leaves[part.number], tree)


def _stack(number: int, layer: jax.Array) -> jax.Array:
  """Room for so many layers like the one given."""
  of_layer = layer.sharding
  assert isinstance(of_layer, jax.NamedSharding)
  sharding = jax.NamedSharding(of_layer.mesh, jax.P(None, *of_layer.spec))
  return jnp.zeros((number, *layer.shape), layer.dtype, device=sharding)


def zeros(name: str, leaf: Any) -> jax.Array:
  """An array like the abstract `leaf`, where it is to live."""
  target = restore_target(name, leaf)
  return jnp.zeros(target.shape, target.dtype, device=target.sharding)


def local_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Bytes of an array on each of its devices."""
  assert array.sharding is not None
  return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _copy(source: jax.Array, target: np.ndarray, where: slice) -> int:
  """Copy a range of bytes and return its length; numpy releases the GIL for plain bytes."""
  as_bytes = lambda array: array.reshape(-1).view(np.uint8)[where]
  np.copyto(as_bytes(target), as_bytes(np.asarray(source)))
  return as_bytes(target).nbytes


def _pinned(stack: jax.Array, place: int) -> jax.Array:
  if _is_staged(stack):
    taken = []
    for shard, at in _shards_for(stack, place):
      with _alone(shard.device):
        taken.append(_layer_of(shard.data, at))
    layer = _layer(stack, place, taken)
  else:
    layer = _layer_of(stack, place)
  return jax.device_put(layer, layer.sharding.with_memory_kind(HOST)).block_until_ready()


def _view(stack: jax.Array, place: int) -> jax.Array:
  views = [
    jax.device_put(np.asarray(shard.data)[at], shard.device, may_alias=True)
    for shard, at in _shards_for(stack, place)
  ]
  return _layer(stack, place, views)


def _layer(stack: jax.Array, place: int, arrays: list[jax.Array]) -> jax.Array:
  """A layer out of its parts on this process's devices."""
  sharding = of_layer(stack.sharding, place, len(stack))
  return jax.make_array_from_single_device_arrays(
    stack.shape[1:], sharding, arrays, dtype=stack.dtype
  )


def _shards_with(stack: jax.Array, place: int) -> list[tuple[Any, int]]:
  """This process's shards of a stack that hold a layer, and where in them it is."""
  shards = []
  for shard in stack.addressable_shards:
    start, stop, _ = shard.index[0].indices(len(stack))
    if start <= place < stop:
      shards.append((shard, place - start))
  return shards


def _shards_for(stack: jax.Array, place: int) -> list[tuple[Any, int]]:
  """`_shards_with`; in a job of several processes all, with a layer that nobody writes."""
  shards = _shards_with(stack, place)
  if jax.process_count() == 1:
    return shards
  at = {shard.device: index for shard, index in shards}
  return [(shard, at.get(shard.device, 0)) for shard in stack.addressable_shards]


def _put_layer(stack: jax.Array, layer: jax.Array, place: int) -> jax.Array:
  """`stack` with a layer in its place; the old one is donated."""
  if not _is_staged(stack):
    return _with_layer(stack, layer, place)
  # On the devices of its stage alone: no program of all devices can take both arrays.
  at = {shard.device: index for shard, index in _shards_with(stack, place)}
  new = {shard.device: shard.data for shard in layer.addressable_shards}
  shards = []
  for shard in stack.addressable_shards:
    data = shard.data
    if shard.device in at:
      with _alone(shard.device):
        data = _with_layer(data, new[shard.device], at[shard.device])
    shards.append(data)
  return jax.make_array_from_single_device_arrays(stack.shape, stack.sharding, shards)


def _alone(device: Any) -> contextlib.AbstractContextManager[Any]:
  """For a program of one device, where the mesh that is set has others."""
  return jax.set_mesh(jax.sharding.Mesh(np.array(device), ()))


def _is_staged(stack: jax.Array) -> bool:
  """Whether the stages of a pipeline share the layers of a stack."""
  return isinstance(stack.sharding, jax.NamedSharding) and any(stack.sharding.spec[:1])


@jax.jit
def _layer_of(stack: jax.Array, place: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(stack: jax.Array, layer: jax.Array, place: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(stack, layer, place, axis=0)
