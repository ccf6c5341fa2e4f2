"""Array operations that name logical axes: the only place that spells `out_sharding`."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.sharding.rules import (
  PART_PLANS,
  STATE_PARTS,
  StatePart,
  current_plan,
  current_rules,
  spec,
)

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


def ensure_sharding(x: jax.Array, *axes: str | None) -> jax.Array:
  """Reshard `x` to logical `axes` unless it has this sharding already."""
  return _reshard_if_needed(x, spec(*axes))


def row_axis(rows: int) -> str:
  """The logical axis of `rows` rows outside of the layers.

  It is "rows" where the stages of a pipeline divide them, else "batch".
  """
  shared = num_shards("layers") > 1 and rows % num_shards("rows") == 0
  return "rows" if shared else "batch"


def _reshard_if_needed(x: jax.Array, cut: jax.P) -> jax.Array:
  return x if jax.typeof(x).sharding.spec == cut else jax.reshard(x, cut)


def replicate(x: jax.Array) -> jax.Array:
  """Replicate `x` on every device."""
  cut = any(jax.typeof(x).sharding.spec)
  return jax.reshard(x, jax.P(*[None] * x.ndim)) if cut else x


def reshard_part(x: jax.Array, part: StatePart, *axes: str | None) -> jax.Array:
  """Reshard `x` to logical `axes` by the rules for `part`, unless it is sharded so already."""
  return _reshard_if_needed(x, spec(*axes, part=part))


def has_own_sharding(part: StatePart) -> bool:
  """Whether the current plan shards `part` of the state differently from the weights."""
  return part in PART_PLANS.get(current_plan().name, {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def redirect_gradient(spec: jax.P, shards: jax.Array, gathered: jax.Array) -> jax.Array:
  """Return `gathered`; its gradient is reduce-scattered and goes to `shards` instead.

  Args:
    spec: sharding of `shards`.
    shards: the same values, sharded further; they are not read.
    gathered: the values to compute with, which get no gradient.
  """
  del spec, shards
  return gathered


def _redirect_gradient_fwd(spec, shards, gathered):
  del spec, shards
  return gathered, None  # itself: a loop over layers then keeps no copy of it for the backward pass


def _redirect_gradient_bwd(spec, _, cotangent):
  return jax.reshard(cotangent, spec), None


redirect_gradient.defvjp(_redirect_gradient_fwd, _redirect_gradient_bwd)


def uninitialised(shape: Sequence[int], dtype: Any, cut: jax.P) -> jax.Array:
  """Allocate an array without writing it, sharded by the partition spec `cut`."""
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
  """Wrap `f` to run on each device's block (`jax.shard_map`), where XLA cannot partition it.

  Args:
    f: function of local arrays; each argument is resharded to its `in_axes` first.
    in_axes: logical axes of each argument.
    out_axes: a pytree of the results, with a plain tuple of logical axes for each array.
  """
  to_specs = lambda axes: jax.tree.map(lambda a: spec(*a), axes, is_leaf=_is_axes)
  in_specs = tuple(map(_with_unit_axes, to_specs(tuple(in_axes))))
  # check_vma=False: with it, sorting inside an island has given wrong gradients without an error.
  mapped = jax.shard_map(f, in_specs=in_specs, out_specs=to_specs(out_axes), check_vma=False)
  return lambda *args: mapped(*(jax.reshard(a, s) for a, s in zip(args, in_specs, strict=True)))


def _with_unit_axes(cut: jax.P) -> jax.P:
  """Add the mesh axes of size 1 to a partition spec.

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


def map_shards(f: Callable, *args: jax.Array, out_like: Sequence[int | None]) -> Any:
  """Run `f` on each device's block of `args` without resharding, for row-wise kernels.

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


class _Spread(NamedTuple):
  """How whole tensors of a stack are distributed over devices, by the entries of its dimensions.

  Attributes:
    exchanged: over the axes that shard tensors.
    all: and over those along which there are copies.
    left: axes that divide no dimension; devices along them do the same.
    length: of the first dimension, filled up to where the axes divide it.
  """

  exchanged: tuple[Any, ...]
  all: tuple[Any, ...]
  left: list[str]
  length: int


def _spread_tensors(x: jax.Array, num_stacked: int, *, can_pad: bool) -> _Spread:
  names = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else entry
  cut, mesh = jax.typeof(x).sharding.spec, jax.sharding.get_abstract_mesh()
  sizes = {n: s for n, s in mesh.shape.items() if s > 1}
  length, left = list(x.shape[:num_stacked]), []
  stack = [[n for n in names(entry) if n in sizes] for entry in cut[:num_stacked]]
  can_pad = can_pad and bool(stack) and not stack[0]
  of_tensors = [n for entry in cut[num_stacked:] for n in names(entry) if n in sizes]
  of_copies = [n for n in sizes if n not in of_tensors and all(n not in names for names in stack)]

  def add(axes: Sequence[str]) -> tuple[Any, ...]:
    """Shard the stack over further mesh axes, each along the first dimension that it divides."""
    for axis in axes:
      ways = [sizes[axis] * math.prod(sizes[n] for n in taken) for taken in stack]
      fits = [d for d, (n, way) in enumerate(zip(length, ways, strict=True)) if n % way == 0]
      if fits or can_pad:
        stack[fits[0] if fits else 0].append(axis)
      else:
        left.append(axis)
      if can_pad and not fits:
        length[0] += -length[0] % ways[0]
    return tuple(tuple(taken) or None for taken in stack)

  # Axes that shard tensors first: theirs are the exchanges, of blocks that lie together.
  exchanged, spread = add(of_tensors), add(of_copies)
  return _Spread(exchanged, spread, left, length[0] if num_stacked else 0)


def map_tensors(
  f: Callable[..., tuple[Any, ...]],
  num_stacked: int,
  *args: Any,
  whole: tuple[jax.Array, ...] = (),
) -> tuple[Any, ...]:
  """Run `f` on blocks of whole tensors of a stack, distributed over all devices.

  There is one exchange of an array there and one back, and none within `f`; copies on several
  devices are gathered behind the latter. What lies as `zeros_of_tensors` lays it stays where it is
  if the mesh axes divide the stack.

  Args:
    f: function of local arrays [*stack, *tensor] in trees like `args`, and of those of `whole`. It
      returns trees like `args` with the same shapes, whose dtypes may be others.
    num_stacked: how many dimensions count tensors. Where a mesh axis divides none of them, the
      first is filled up with zeros; if that is sharded, devices along the axis do the same.
    args: trees of arrays with the same stack dimensions, sharded in any way. The sharding of the
      first array decides where each tensor goes.
    whole: replicated arrays, which every device needs.

  Returns:
    What `f` returns, sharded like the arguments in the same places.
  """
  if _is_local(jax.sharding.get_abstract_mesh()):
    return f(*args, *whole)
  leaves, tree = jax.tree.flatten(args)
  first, cuts = leaves[0], [jax.typeof(x).sharding.spec for x in leaves]
  to = _spread_tensors(first, num_stacked, can_pad=True)
  missing = to.length - first.shape[0] if num_stacked else 0

  def stops(x: jax.Array, cut: jax.P) -> list[jax.P]:
    """Its shardings on the way. Tensors go first to one of all devices that have copies."""
    through = [to.exchanged] if cut == cuts[0] else []
    return [jax.P(*e, *[None] * (x.ndim - num_stacked)) for e in (*through, to.all)]

  def move(x: jax.Array, cut: jax.P) -> jax.Array:
    if missing:  # the padding of a dimension that is not sharded moves nothing
      x = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
    return functools.reduce(_reshard_if_needed, stops(x, cut), x)

  def move_back(y: jax.Array, cut: jax.P) -> jax.Array:
    y = functools.reduce(_reshard_if_needed, (*reversed(stops(y, cut)), cut), y)
    return jax.lax.slice_in_dim(y, 0, to.length - missing) if missing else y

  def of_blocks(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    blocks, rest = arrays[: len(leaves)], arrays[len(leaves) :]
    return tuple(jax.tree.leaves(f(*tree.unflatten(blocks), *rest)))

  moved = map(move, leaves, cuts)
  done = map_shards(of_blocks, *moved, *whole, out_like=range(len(leaves)))
  return tree.unflatten(map(move_back, done, cuts))


def zeros_of_tensors(
  like: jax.Array, num_stacked: int, tensor: Sequence[int], dtype: Any
) -> jax.Array:
  """Zeros [*stack, *tensor], each tensor where `map_tensors` works on that of `like`.

  Mesh axes that do not divide the stack shard the first dimension of the tensors, if they can.
  """
  shape, mesh = (*like.shape[:num_stacked], *tensor), jax.sharding.get_abstract_mesh()
  if _is_local(mesh):
    return jnp.zeros(shape, dtype)
  to = _spread_tensors(like, num_stacked, can_pad=False)
  of_rows, ways = [], 1
  for axis in to.left:
    if tensor[0] % (ways * mesh.shape[axis]) == 0:
      ways *= mesh.shape[axis]
      of_rows.append(axis)
  rest = [None] * (len(tensor) - 1)
  return jnp.zeros(shape, dtype, out_sharding=jax.P(*to.all, tuple(of_rows) or None, *rest))


def has_several_devices() -> bool:
  """Whether the current mesh has more than one device."""
  return jax.sharding.get_abstract_mesh().size > 1


def _is_local(mesh: jax.sharding.AbstractMesh) -> bool:
  """Whether arrays are local to a device: without a mesh, or inside an island.

  Inside a pipeline one axis is manual, and arrays are still sharded over the others.
  """
  return len(mesh.manual_axes) == len(mesh.axis_names)


def _is_axes(x: Any) -> bool:
  return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def mesh_axes(axis: str | None, part: StatePart = "weights") -> tuple[str, ...]:
  """The mesh axes that a logical axis is sharded over."""
  names = current_rules(part)[axis]
  return (names,) if isinstance(names, str) else names or ()


def num_shards(axis: str | None, part: StatePart = "weights") -> int:
  """The number of shards of a dimension with this logical axis on the current mesh."""
  shape = jax.sharding.get_abstract_mesh().shape
  return math.prod(shape.get(name, 1) for name in mesh_axes(axis, part))


def check_divisible(axis: str | None, size: int, name: str) -> None:
  """Check that the current mesh divides a dimension of a weight.

  Args:
    axis: the logical axis of the dimension.
    size: its length.
    name: the setting that gives the length.

  Raises:
    ValueError: if it does not. (jax would refuse later, and could not name the setting.)
  """
  mesh = jax.sharding.get_abstract_mesh().shape
  for part in STATE_PARTS:
    ways = num_shards(axis, part)
    if size % ways:
      cut_by = [a for a in mesh_axes(axis, part) if mesh[a] > 1]
      product = " x ".join(f"mesh.{a}={mesh[a]}" for a in cut_by)
      raise ValueError(
        f"{product} does not divide {name}={size}, over which {part} are sharded. "
        f"Use a multiple of {ways}, or another mesh."
      )


def num_isolated_replicas() -> int:
  """The number of replicas where each is traced by itself (`replicas.map_replicas`), else 1."""
  return num_shards("replica") if current_plan().isolated_replica else 1


def draw_own_rows(
  draw: Callable[[tuple[int, ...], jax.P], jax.Array], shape: tuple[int, ...], cut: jax.P
) -> jax.Array:
  """Draw random numbers for the rows of this replica.

  Where replicas are traced by themselves, the numbers of all replicas are drawn and its own are
  taken, so that each row gets the same numbers as without. XLA fuses the two.

  Args:
    draw: `(shape, spec) -> numbers`.
    shape: [rows, ...].
    cut: the partition spec of the result.
  """
  number = num_isolated_replicas()
  if number == 1:
    return draw(shape, cut)
  # A number depends on its place alone: [replicas, rows, ...] are those of all rows in a row.
  of_all = draw((number, *shape), jax.P(None, *cut))
  own = jax.lax.axis_index(mesh_axes("replica"))
  return jax.lax.dynamic_index_in_dim(of_all, own, keepdims=False)


def all_sum(x: jax.Array, *axes: str | None, excluding: str | None = None) -> jax.Array:
  """Inside an island: all-reduce (sum) over the devices along logical axes.

  Args:
    x: local array.
    axes: the logical axes.
    excluding: a logical axis whose mesh axes are left out of the sum.
  """
  mesh, apart = jax.sharding.get_abstract_mesh().shape, mesh_axes(excluding)
  names = (name for axis in axes for name in mesh_axes(axis))
  # XLA keeps a sum over devices also where there is one.
  names = tuple(name for name in names if name not in apart and mesh.get(name, 1) > 1)
  return jax.lax.psum(x, names) if names else x


def all_max(x: jax.Array, axis: str) -> jax.Array:
  """Inside an island: the maximum over the devices along a logical axis."""
  return jax.lax.pmax(x, mesh_axes(axis)) if num_shards(axis) > 1 else x


def axis_index(axis: str) -> jax.Array | int:
  """Inside an island: the index of this device's shard of a logical axis."""
  return jax.lax.axis_index(mesh_axes(axis)) if num_shards(axis) > 1 else 0


type Groups = list[list[int]]


def num_hosts() -> int:
  """The number of hosts that the experts are spread over in the current plan."""
  return current_plan().hosts


def within_hosts(axis: str) -> Groups:
  """For each host, the indices of its devices along a logical axis."""
  return np.arange(num_shards(axis)).reshape(num_hosts(), -1).tolist()


def between_hosts(axis: str) -> Groups:
  """For each position on a host, the indices of the devices there along a logical axis."""
  return np.arange(num_shards(axis)).reshape(num_hosts(), -1).T.tolist()


def all_to_all(
  x: jax.Array, axis: str, *, split: int = 0, join: int = 0, groups: Groups | None = None
) -> jax.Array:
  """Inside an island: send block i of a dimension to device i along a logical axis.

  Args:
    x: local array.
    axis: the logical axis.
    split: the dimension that is split into blocks.
    join: the dimension along which the received blocks are concatenated, in order of senders.
    groups: groups of devices that exchange among themselves; i counts within the group. None = one
      group of all devices.
  """
  if _group_size(axis, groups) == 1:
    return x
  return jax.lax.all_to_all(
    x, mesh_axes(axis), split_axis=split, concat_axis=join, axis_index_groups=groups, tiled=True
  )


def all_gather(x: jax.Array, axis: str, dim: int = 0, groups: Groups | None = None) -> jax.Array:
  """Inside an island: concatenate the blocks of all devices along a logical axis.

  The blocks are joined along dimension `dim`; with `groups`, those of the devices of one group.
  """
  if _group_size(axis, groups) == 1:
    return x
  return jax.lax.all_gather(x, mesh_axes(axis), axis=dim, axis_index_groups=groups, tiled=True)


def reduce_scatter(
  x: jax.Array, axis: str, dim: int = 0, groups: Groups | None = None
) -> jax.Array:
  """Inside an island: sum over the devices along a logical axis, and keep one block.

  The transpose of `all_gather`: device i keeps block i of dimension `dim` of the sum.
  """
  if _group_size(axis, groups) == 1:
    return x
  return jax.lax.psum_scatter(
    x, mesh_axes(axis), scatter_dimension=dim, axis_index_groups=groups, tiled=True
  )


def _group_size(axis: str, groups: Groups | None) -> int:
  return len(groups[0]) if groups else num_shards(axis)
