"""Array operations that name logical axes: the only place that spells `out_sharding`."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.sharding.rules import KEPT, PARTS, Part, current_plan, current_rules, spec

Axes = Sequence[str | None]


def einsum(formula: str, *operands: jax.Array, axes: Axes, **kwargs: Any) -> jax.Array:
  """`jnp.einsum` whose result is sharded by logical `axes`."""
  return jnp.einsum(formula, *operands, out_sharding=spec(*axes), **kwargs)


def reshape(x: jax.Array, shape: Sequence[int], *, axes: Axes) -> jax.Array:
  """`x.reshape(shape)`, sharded by logical `axes`."""
  return jax.lax.reshape(x, shape, out_sharding=spec(*axes))


def reshard(x: jax.Array, *axes: str | None) -> jax.Array:
  """Move `x` to the sharding of logical `axes`."""
  return jax.reshard(x, spec(*axes))


def lay(x: jax.Array, *axes: str | None) -> jax.Array:
  """`x` in the sharding of logical `axes`; as it is if it is there."""
  return _moved(x, spec(*axes))


def seq_axis(width: str | None) -> str:
  """The logical axis of positions beside a dimension: "seq" if both would be cut alike.

  The residual stream may be cut along its positions by mesh axes that cut a width in a sub-layer
  (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2): there positions are not.

  Args:
    width: logical axis of the other dimension.
  """
  return "seq" if {*mesh_axes(width)} & _of_positions() else "residual_seq"


def row_axis(rows: int) -> str:
  """The logical axis of rows outside of the layers; stages of a pipeline share them, if they can.

  Args:
    rows: how many.
  """
  shared = num_shards("layers") > 1 and rows % num_shards("rows") == 0
  return "rows" if shared else "batch"


def gather_positions(x: jax.Array, *axes: str | None) -> jax.Array:
  """The residual stream, sharded by `axes`, for a sub-layer whose devices use all positions of it.

  The derivative adds up what they make of it and scatters the sum along positions.
  """
  return jax.reshard(x, jax.P(*spec(*axes), reduced=_shares()))


def einsum_shares(formula: str, *operands: jax.Array, axes: Axes) -> jax.Array:
  """`einsum` from a sub-layer to the residual stream: shares are summed, positions scattered.

  Args:
    formula: as of `jnp.einsum`.
    operands: likewise; positions are cut as "seq".
    axes: of the result, with "residual_seq".
  """
  at_seq = spec(*("seq" if axis == "residual_seq" else axis for axis in axes))
  shares = jax.P(*at_seq, unreduced=_shares())
  return jax.reshard(jnp.einsum(formula, *operands, out_sharding=shares), spec(*axes))


def _of_positions() -> frozenset[str]:
  """Mesh axes that cut the residual stream along its positions, and widths in sub-layers."""
  return frozenset(mesh_axes("residual_seq")) - {*mesh_axes("seq")}


def _shares() -> frozenset[str]:
  """Mesh axes along which a type says that devices hold shares of a sum.

  Without it each product is summed whole, and then cut. Of the layers in a pipeline no type may say
  so: XLA ends the process where there are manual axes too.
  """
  is_staged = bool(jax.sharding.get_abstract_mesh().manual_axes)
  return frozenset() if is_staged else _of_positions()


def _moved(x: jax.Array, cut: jax.P) -> jax.Array:
  return x if jax.typeof(x).sharding.spec == cut else jax.reshard(x, cut)


def whole(x: jax.Array) -> jax.Array:
  """All of `x` on every device."""
  cut = any(jax.typeof(x).sharding.spec)
  return jax.reshard(x, jax.P(*[None] * x.ndim)) if cut else x


def reshard_part(x: jax.Array, part: Part, *axes: str | None) -> jax.Array:
  """Move `x` to the sharding that the plan has for a part of the state; as it is if it is there."""
  return _moved(x, spec(*axes, part=part))


def is_apart(part: Part) -> bool:
  """Whether the plan in use shards a part of the state otherwise than the weights."""
  return part in KEPT.get(current_plan().name, {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def standing_for(cut: jax.P, shards: jax.Array, whole: jax.Array) -> jax.Array:
  """`whole`, whose gradient goes to `shards`, its own shards, as a sum scattered over devices.

  Args:
    cut: sharding of `shards`.
    shards: not read.
    whole: gets no gradient.
  """
  del cut, shards
  return whole


def _standing_for_fwd(cut, shards, whole):
  del cut, shards
  return whole, None  # itself: a loop over layers then keeps no copy of it for the backward pass


def _standing_for_bwd(cut, _, cotangent):
  return jax.reshard(cotangent, cut), None


standing_for.defvjp(_standing_for_fwd, _standing_for_bwd)


def unwritten(shape: Sequence[int], dtype: Any, cut: jax.P) -> jax.Array:
  """An array that somebody is going to write all of, cut as a partition spec says."""
  mesh = jax.sharding.get_abstract_mesh()
  if _is_local(mesh):
    return jax.lax.empty(shape, dtype)
  # Asked for as a whole, XLA allocates the whole on each device.
  names = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else entry
  ways = [math.prod(mesh.shape[name] for name in names(entry)) for entry in cut]
  local = tuple(size // n for size, n in itertools.zip_longest(shape, ways, fillvalue=1))
  make = lambda: jax.lax.empty(local, dtype)
  return jax.shard_map(make, in_specs=(), out_specs=cut, check_vma=False)()


def island(f: Callable, *, in_axes: Sequence[Axes], out_axes: Any) -> Callable:
  """Run `f` on each device's block (`jax.shard_map`), for what the compiler cannot partition.

  Args:
    f: function of local arrays; each argument is resharded to `in_axes` first.
    in_axes: logical axes of each argument.
    out_axes: a pytree of the results, with a plain tuple of logical axes for each array.
  """
  to_specs = lambda axes: jax.tree.map(lambda a: spec(*a), axes, is_leaf=_is_axes)
  in_specs = tuple(map(_with_axes_of_one, to_specs(tuple(in_axes))))
  # check_vma=False: with it, sorting inside an island has given wrong gradients without an error.
  mapped = jax.shard_map(f, in_specs=in_specs, out_specs=to_specs(out_axes), check_vma=False)
  return lambda *args: mapped(*(jax.reshard(a, s) for a, s in zip(args, in_specs, strict=True)))


def _with_axes_of_one(cut: jax.P) -> jax.P:
  """`cut`, which also names the mesh axes of one device.

  The derivative of an island is summed over all axes that an argument does not name. XLA keeps such
  a sum also where there is nothing to add up.
  """
  mesh = jax.sharding.get_abstract_mesh()
  names = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else entry
  taken = {*mesh.manual_axes, *(n for entry in cut for n in names(entry))}
  alone = [n for n, size in mesh.shape.items() if size == 1 and n not in taken]
  if not alone or not len(cut):
    return cut
  return jax.P((*names(cut[0]), *alone), *cut[1:])


def in_place(f: Callable, *args: jax.Array, out_like: Sequence[int | None]) -> Any:
  """Run `f` on each device's block of `args`, cut as they are: for what works row by row.

  Inside an island, and without a mesh, the blocks are the arrays.

  Args:
    f: function of local arrays that returns a tuple.
    args: arrays. Their dimensions that `f` works along must not be sharded.
    out_like: for each result, the argument that it is sharded like. None = a partial result
      [parts, ...] to be summed over its first dimension: those of all devices are stacked.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if _is_local(mesh):
    return f(*args)
  specs = [jax.typeof(a).sharding.spec for a in args]
  cut = [entry for entry in specs[0] if entry is not None]
  stacked = jax.P(tuple(n for e in cut for n in ((e,) if isinstance(e, str) else e)) or None)
  out_specs = tuple(stacked if i is None else specs[i] for i in out_like)
  return jax.shard_map(f, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)(*args)


def is_shared() -> bool:
  """Whether several devices share the work."""
  return jax.sharding.get_abstract_mesh().size > 1


def _is_local(mesh: jax.sharding.AbstractMesh) -> bool:
  """Whether arrays are a device's own: without a mesh, or inside an island.

  Inside a pipeline one axis is manual; what lies on the others is still to be cut.
  """
  return len(mesh.manual_axes) == len(mesh.axis_names)


def _is_axes(x: Any) -> bool:
  return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def mesh_axes(axis: str | None, part: Part = "weights") -> tuple[str, ...]:
  """The mesh axes that a logical axis is sharded over."""
  names = current_rules(part)[axis]
  return (names,) if isinstance(names, str) else names or ()


def num_shards(axis: str | None, part: Part = "weights") -> int:
  """Into how many pieces the current mesh cuts a dimension with this logical axis."""
  shape = jax.sharding.get_abstract_mesh().shape
  return math.prod(shape.get(name, 1) for name in mesh_axes(axis, part))


def check_cut(axis: str | None, size: int, name: str) -> None:
  """See that the current mesh divides a dimension of a weight.

  Args:
    axis: its logical axis.
    size: its length.
    name: of the setting that it comes from.

  Raises:
    ValueError: if it does not. (jax would refuse later, and could not name the setting.)
  """
  mesh = jax.sharding.get_abstract_mesh().shape
  for part in PARTS:
    ways = num_shards(axis, part)
    if size % ways:
      cut_by = [a for a in mesh_axes(axis, part) if mesh[a] > 1]
      product = " x ".join(f"mesh.{a}={mesh[a]}" for a in cut_by)
      raise ValueError(
        f"{product} does not divide {name}={size}, over which {part} are sharded. "
        f"Use a multiple of {ways}, or another mesh."
      )


def num_apart() -> int:
  """Of how many replicas this is one, where each is traced by itself; else 1."""
  return num_shards("replica") if current_plan().own_rows else 1


def of_own_rows(
  draw: Callable[[tuple[int, ...], jax.P], jax.Array], shape: tuple[int, ...], cut: jax.P
) -> jax.Array:
  """Random numbers of rows: where a replica is by itself, those that its rows have in the batch.

  All are drawn and the replica's taken; where XLA fuses the two, no others are made.

  Args:
    draw: `(shape, cut) -> numbers`.
    shape: [rows, ...].
    cut: how the result is sharded.
  """
  number = num_apart()
  if number == 1:
    return draw(shape, cut)
  # A number depends on its place alone: [replicas, rows, ...] are those of all rows in a row.
  of_all = draw((number, *shape), jax.P(None, *cut))
  own = jax.lax.axis_index(mesh_axes("replica"))
  return jax.lax.dynamic_index_in_dim(of_all, own, keepdims=False)


def all_sum(x: jax.Array, *axes: str, but: str | None = None) -> jax.Array:
  """Inside an island: add up the shares that the devices along logical axes hold.

  Args:
    x: local array.
    axes: the logical axes.
    but: not over the mesh axes of this one.
  """
  mesh, apart = jax.sharding.get_abstract_mesh().shape, mesh_axes(but)
  names = (name for axis in axes for name in mesh_axes(axis))
  # XLA keeps a sum over devices also where there is one.
  names = tuple(name for name in names if name not in apart and mesh.get(name, 1) > 1)
  return jax.lax.psum(x, names) if names else x


def all_max(x: jax.Array, axis: str) -> jax.Array:
  """Inside an island: the maximum over the devices along a logical axis."""
  return jax.lax.pmax(x, mesh_axes(axis)) if num_shards(axis) > 1 else x


def axis_index(axis: str) -> jax.Array | int:
  """Inside an island: which piece of a logical axis this device holds."""
  return jax.lax.axis_index(mesh_axes(axis)) if num_shards(axis) > 1 else 0


type Groups = list[list[int]]


def num_hosts() -> int:
  """Over how many hosts the experts are spread, by the plan in use."""
  return current_plan().hosts


def within_hosts(axis: str) -> Groups:
  """Which pieces of a logical axis are on one host, for each host."""
  return np.arange(num_shards(axis)).reshape(num_hosts(), -1).tolist()


def between_hosts(axis: str) -> Groups:
  """Which pieces of a logical axis have the same place on their hosts, for each place."""
  return np.arange(num_shards(axis)).reshape(num_hosts(), -1).T.tolist()


def exchange(
  x: jax.Array, axis: str, *, split: int = 0, join: int = 0, groups: Groups | None = None
) -> jax.Array:
  """Inside an island: send block i of a dimension to device i along a logical axis.

  Args:
    x: local array.
    axis: the logical axis.
    split: the dimension that the blocks are of.
    join: along which dimension the result has them: its block j is what device j sent here.
    groups: of devices, each by itself: i and j count in the group. None = one of all.
  """
  if _size(axis, groups) == 1:
    return x
  return jax.lax.all_to_all(
    x, mesh_axes(axis), split_axis=split, concat_axis=join, axis_index_groups=groups, tiled=True
  )


def send(x: jax.Array, axis: str, to: Sequence[int]) -> jax.Array:
  """Inside an island: send `x` to another device along a logical axis, and get one's from another.

  Args:
    x: local array.
    axis: the logical axis.
    to: device i sends to device `to[i]`; each gets one.
  """
  if list(to) == list(range(len(to))):
    return x
  return jax.lax.ppermute(x, mesh_axes(axis), list(enumerate(to)))


def gather_blocks(x: jax.Array, axis: str, dim: int = 0, groups: Groups | None = None) -> jax.Array:
  """Inside an island: the blocks of all devices along a logical axis, joined by dimension `dim`.

  With `groups`, of the devices of a group.
  """
  if _size(axis, groups) == 1:
    return x
  return jax.lax.all_gather(x, mesh_axes(axis), axis=dim, axis_index_groups=groups, tiled=True)


def sum_blocks(x: jax.Array, axis: str, dim: int = 0, groups: Groups | None = None) -> jax.Array:
  """Inside an island: add up what the devices along a logical axis hold, and keep one block.

  The opposite of `gather_blocks`: device i keeps block i of dimension `dim` of the sum.
  """
  if _size(axis, groups) == 1:
    return x
  return jax.lax.psum_scatter(
    x, mesh_axes(axis), scatter_dimension=dim, axis_index_groups=groups, tiled=True
  )


def _size(axis: str, groups: Groups | None) -> int:
  return len(groups[0]) if groups else num_shards(axis)
