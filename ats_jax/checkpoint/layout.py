"""State pytree <-> flat dict of named arrays, so that the files do not depend on Python classes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

PyTree = Any


def named_leaves(tree: PyTree, root: str = "") -> dict[str, Any]:
  """Flatten `tree` to {"model/layers/0/kernel": leaf, ...}, in the order of `jax.tree.leaves`.

  Dict keys, attribute names and list indices become the parts of a name. The `value` attribute in
  which `nnx.Variable` boxes its array is dropped.

  Args:
    tree: pytree of arrays, or of what has their shape and dtype.
    root: name of `tree` itself when it is a part of a state, e.g. "model".

  Raises:
    ValueError: if a leaf is not an array, or two leaves would have the same name.
  """
  leaves = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
      path = path[:-1]
    parts = [root, jax.tree_util.keystr(path, simple=True, separator="/")]
    name = "/".join(p for p in parts if p)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
      raise ValueError(
        f"state leaf {name!r} is a {type(leaf).__name__} ({leaf!r}); only arrays are saved. "
        "Make it a jax.Array, or put it in `extra`."
      )
    if name in leaves:
      raise ValueError(f"state has two leaves named {name!r}. Rename one.")
    leaves[name] = leaf
  parents = {name[:i] for name in leaves for i, c in enumerate(name) if c == "/"}
  if "" in leaves or parents & leaves.keys():
    clash = min(parents & leaves.keys(), default="")
    raise ValueError(
      f"state leaf {clash!r} cannot be told from the group {clash!r} of other leaves. Put the "
      "state in a dict or a dataclass, and call no field of a dataclass `value`."
    )
  return leaves


def describe(leaves: Mapping[str, Any]) -> dict[str, str]:
  """Return the dtype and shape of each leaf as text: {"step": "int32[]", ...}."""
  return {n: f"{x.dtype}[{','.join(map(str, x.shape))}]" for n, x in leaves.items()}


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
  """Say in a line each how two `describe` results differ; empty if they are the same."""
  return [
    f"{name} is {saved.get(name, 'not there')} in the checkpoint, "
    f"{wanted.get(name, 'not there')} in this program"
    for name in sorted(saved.keys() | wanted.keys())
    if saved.get(name) != wanted.get(name)
  ]


def stored(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Return the leaves that have bytes to write; Orbax refuses arrays of size zero."""
  return {name: x for name, x in leaves.items() if x.size}


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


def rebuild(abstract: PyTree, arrays: Mapping[str, jax.Array], root: str = "") -> PyTree:
  """Return `abstract` with its leaves replaced by the `arrays` of the same names."""
  leaves = []
  for name, leaf in named_leaves(abstract, root).items():
    if leaf.size:
      leaves.append(arrays[name])
    else:
      target = restore_target(name, leaf)
      leaves.append(jnp.zeros(target.shape, target.dtype, device=target.sharding))
  return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def abstract_like(tree: PyTree, mesh: Mesh) -> PyTree:
  """Return the shapes and dtypes of `tree` with its partition specs on the concrete `mesh`.

  Under `jax.set_mesh`, `jax.eval_shape` returns shardings on an abstract mesh; a checkpoint can be
  restored only onto devices. Scalars without a sharding become replicated.

  Args:
    tree: arrays or `ShapeDtypeStruct`s with `NamedSharding`s, e.g. from `jax.eval_shape`.
    mesh: where to put them; it must have the axes that the specs name.

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
