"""A table of a model's parameters."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey


def parameter_overview(model: Any) -> str:
  """Returns a table of the leaves: path, shape, dtype, number of elements, bytes, sharding.

  Args:
    model: any pytree of arrays or `jax.ShapeDtypeStruct`s, e.g. a Flax NNX module in tree mode or
      its `jax.eval_shape`. Sharding is the PartitionSpec, empty where the leaf has none.

  Raises:
    ValueError: a leaf has no shape and dtype.
  """
  rows = [("parameter", "shape", "dtype", "size", "bytes", "sharding")]
  total_size = total_bytes = device_bytes = 0
  for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
    name = _name(path)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise ValueError(f"parameter {name!r} is a {type(leaf).__name__}, expected an array")
    sharding = getattr(leaf, "sharding", None)
    shard_shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    size, itemsize = math.prod(leaf.shape), leaf.dtype.itemsize
    spec = str(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else ""
    shape, dtype = str(tuple(leaf.shape)), str(leaf.dtype)
    rows.append((name, shape, dtype, f"{size:,}", f"{size * itemsize:,}", spec))
    total_size += size
    total_bytes += size * itemsize
    device_bytes += math.prod(shard_shape) * itemsize
  total = f"total: {total_size:,} parameters, {total_bytes:,} bytes ({total_bytes / 2**30:.3f} GiB)"
  if device_bytes != total_bytes:
    total += f", {device_bytes:,} bytes ({device_bytes / 2**30:.3f} GiB) on each device"
  return "\n".join([*_align(rows), total])


def _name(path: tuple[Any, ...]) -> str:
  """`blocks.attn.q`; the attribute that holds an nnx.Variable's array is not part of the name."""
  if path and path[-1] == GetAttrKey("value"):
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  sides = "<<<>><"  # numbers to the right
  return [
    "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip()
    for row in rows
  ]
