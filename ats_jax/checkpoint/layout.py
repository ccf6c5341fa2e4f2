"""State pytree <-> named arrays, so that files depend neither on Python classes nor on scans."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
  AbstractMesh,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)

PyTree = Any
WEIGHT = "/weight"  # the end of the name of a module's only array
# A part of a state that begins at zero where a checkpoint has none that fits: rounding errors of
# each replica, which are of no use to other replicas.
UNSENT = "unsent"


# Layers that each stack of them holds, by the path of the stack: {"segments/0/layers/1": [1, 3]}.
type Stacks = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """What becomes one array on the disk: a leaf of the state, or one layer of a stacked leaf.

  Attributes:
    leaf: an array, or an object with the shape, dtype and sharding of one.
    number: index of the leaf in `jax.tree.leaves` of the state.
    layer: index of the layer along the first dimension of the leaf; None = the whole leaf.
  """

  leaf: Any
  number: int
  layer: int | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array on the disk."""
    return self.leaf.shape if self.layer is None else self.leaf.shape[1:]

  def target(self, name: str) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and concrete sharding with which it is restored.

    Raises:
      ValueError: as `restore_target`.
    """
    leaf = restore_target(name, self.leaf)
    sharding = leaf.sharding
    if self.layer is not None:
      sharding = of_layer(sharding, self.layer, self.leaf.shape[0])
    return jax.ShapeDtypeStruct(self.shape, leaf.dtype, sharding=sharding)


def named_arrays(
  tree: PyTree, root: str = "", stacks: Stacks | None = None
) -> dict[str, StoredArray]:
  """Flatten `tree` to {"model/embed": part, "model/layers/7/attn/q": part, ...}, leaf by leaf.

  Dict keys, attribute names and list indices become the parts of a name. The `value` attribute in
  which `nnx.Variable` boxes its array is dropped, and so is `weight` where a module has nothing
  else. A stack of layers is taken apart: its layers go by their index in the model.

  Args:
    tree: pytree of arrays, or of what has their shape and dtype.
    root: name of `tree` itself when it is a part of a state, e.g. "model".
    stacks: layers of each stack, wherever in the state its path is met; None = nothing is stacked.

  Raises:
    ValueError: if a leaf is not an array, or two arrays would have the same name.
  """
  parts: dict[str, StoredArray] = {}
  for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
      path = path[:-1]
    words = [root, jax.tree_util.keystr(path, simple=True, separator="/")]
    name = "/".join(w for w in words if w)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
      raise ValueError(
        f"state leaf {name!r} is a {type(leaf).__name__} ({leaf!r}); only arrays are saved. "
        "Make it a jax.Array, or put it in `extra`."
      )
    for part_name, place in _layers(name, stacks or {}):
      if part_name in parts:
        raise ValueError(f"state has two leaves named {part_name!r}. Rename one.")
      parts[part_name] = StoredArray(leaf, number, place)
  within = Counter(name[:i] for name in parts for i, c in enumerate(name) if c == "/")
  alone = lambda name: name.endswith(WEIGHT) and within[name.removesuffix(WEIGHT)] == 1
  parts = {name.removesuffix(WEIGHT) if alone(name) else name: p for name, p in parts.items()}
  parents = {name[:i] for name in parts for i, c in enumerate(name) if c == "/"}
  if "" in parts or parents & parts.keys():
    clash = min(parents & parts.keys(), default="")
    raise ValueError(
      f"state leaf {clash!r} cannot be told from the group {clash!r} of other leaves. Put the "
      "state in a dict or a dataclass, and call no field of a dataclass `value`."
    )
  return parts


def _layers(name: str, stacks: Stacks) -> list[tuple[str, int | None]]:
  for stack, layers in stacks.items():
    before, separator, after = f"/{name}".partition(f"/{stack}/")
    if separator:
      return [(f"{before}/layers/{i}/{after}"[1:], place) for place, i in enumerate(layers)]
  return [(name, None)]


def describe(parts: Mapping[str, StoredArray]) -> dict[str, str]:
  """Return the dtype and shape of each array as text: {"step": "int32[]", ...}."""
  return {n: f"{p.leaf.dtype}[{','.join(map(str, p.shape))}]" for n, p in parts.items()}


def of_layer(sharding: Sharding, place: int, number: int) -> Sharding:
  """The sharding of layer `place` of a stack of `number` layers.

  Where a pipeline's stages share the layers, on the devices of its stage. Orbax takes no array of
  one process in a job of several: there it is on all devices, those of its stage first, so that
  Orbax writes what they hold (`replica_id` 0).
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh, spec = sharding.mesh, sharding.spec
  if any(spec[:1]):
    axis = spec[0]
    where = mesh.axis_names.index(axis)
    stage = place * mesh.shape[axis] // number
    assert isinstance(mesh, Mesh), "layers are taken apart on devices"
    devices = np.roll(mesh.devices, -stage, axis=where)
    if jax.process_count() == 1:
      devices = np.take(devices, [0], axis=where)
    mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
  return NamedSharding(mesh, PartitionSpec(*spec[1:]))


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
  """Say in a line each how two `describe` results differ; empty if they are the same."""
  return [
    f"{name} is {saved.get(name, 'not there')} in the checkpoint, "
    f"{wanted.get(name, 'not there')} in this program"
    for name in sorted(saved.keys() | wanted.keys())
    if saved.get(name) != wanted.get(name)
  ]


def begun_anew(saved: Mapping[str, str], wanted: Mapping[str, str]) -> set[str]:
  """The names of either `describe` result that are of a part to begin at zero; see `UNSENT`."""
  of_part = lambda names: {k: t for k, t in names.items() if k.startswith(f"{UNSENT}/")}
  ours, theirs = of_part(wanted), of_part(saved)
  return set() if ours == theirs else {*ours, *theirs}


def stored(parts: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Return the parts that have bytes to write; Orbax refuses arrays of size zero."""
  return {name: part for name, part in parts.items() if part.leaf.size}


def restore_target(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
  """Return shape, dtype and concrete sharding to restore `leaf` with; default: the first device.

  Raises:
    ValueError: if the sharding names an AbstractMesh, on which no array can live.
  """
  sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
  if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
    raise ValueError(
      f"{name!r} is to be restored onto an abstract mesh ({sharding}). "
      "Pass abstract_like(state, mesh), which puts the specs on a mesh of devices."
    )
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_like(tree: PyTree, mesh: Mesh) -> PyTree:
  """Return the shapes and dtypes of `tree` with its partition specs on the concrete `mesh`.

  Under `jax.set_mesh`, `jax.eval_shape` returns shardings on an abstract mesh; a checkpoint can be
  restored only onto devices. Scalars without a sharding become replicated.

  Args:
    tree: arrays or `ShapeDtypeStruct`s with `NamedSharding`s, e.g. from `jax.eval_shape`.
    mesh: mesh of devices; it must have the axes that the specs name.

  Raises:
    ValueError: if an array with dimensions has no NamedSharding and `mesh` has several devices.
  """

  def leaf(path: tuple, x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
      spec = sharding.spec
    elif x.ndim == 0 or mesh.size == 1:
      spec = PartitionSpec()
    else:
      raise ValueError(
        f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)} has no NamedSharding (it has "
        f"{sharding}). Make the state under `jax.set_mesh(mesh)`."
      )
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(leaf, tree)
