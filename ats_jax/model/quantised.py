"""Frozen weights of matrices as codes and scales (`ops.packed` has the formats)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.model.layers import Linear, Weight, activation_axes
from ats_jax.model.param import EXPERTS, Constant, Frozen, Param, Role, is_variable
from ats_jax.ops.packed import FORMATS, Packed, encode
from ats_jax.sharding.apply import all_max, ensure_sharding, island, num_shards

OF_MATRICES = frozenset({Role.MATRIX, Role.EXPERT})


class Codes(Frozen):
  """Codes of a frozen weight, with its axes.

  Attributes:
    packed: how many are in an entry.
  """

  packed: int

  @property
  def num_values(self) -> int:
    """The number of codes."""
    return self.size * self.packed


class Quantised(nnx.Module):
  """Stands for the array of a frozen weight.

  Attributes:
    codes: like the weight, or shorter along the last dimension of its inputs.
    scales: floats of groups, or in nf4 their codes.
    steps: in nf4, what these codes are multiplied with; None in other formats.
  """

  def __init__(self, name: str, weight: Param | Frozen):
    """Encode a weight, maybe a stack of them.

    Args:
      name: a key of `FORMATS`.
      weight: of a `Linear` or `ExpertLinear`.

    Raises:
      ValueError: if the mesh cuts a group in two, or an odd number of codes of 4 bits.
    """
    self.name, self.axes, self.role = name, weight.axes, weight.role
    self.num_inputs, self.dtype = weight.num_inputs, jnp.dtype(weight.dtype)
    first = int(self.axes[0] == EXPERTS)
    at = first + self.num_inputs - 1  # of the dimension along which groups are
    self.dim = at - len(self.axes)
    free, format_ = (None,) * (weight.ndim - len(self.axes)), FORMATS[name]
    inputs, axis = self.axes[first : at + 1], self.axes[at]
    size = weight.shape[self.dim]
    groups = size // format_.group_of(size) if format_.group else 1
    self._check(size, groups)
    # Whole along the groups while they are made.
    used = (*self.axes[:at], None, *self.axes[at + 1 :])
    of_columns = tuple(None if first <= n <= at else a for n, a in enumerate(self.axes))
    of_groups = of_columns if groups == 1 and not format_.group else used
    dims = tuple(range(-len(self.axes) + first, self.dim + 1))

    def largest(x: jax.Array) -> jax.Array:
      result = jnp.max(x, dims, keepdims=True)
      for name in inputs[:-1]:
        result = all_max(result, name)
      return result

    results = (used, of_groups, *([of_columns] if name == "nf4" else []))
    made = island(
      lambda w: encode(name, w, self.dim, largest),
      in_axes=((*free, *used),),
      out_axes=tuple((*free, *axes) for axes in results),
    )(weight[...])
    if of_groups is used and groups % num_shards(axis) == 0:
      of_groups = self.axes
    codes, scales, *steps = (
      ensure_sharding(x, *free, *axes)
      for x, axes in zip(made, (self.axes, of_groups, of_columns)[: len(made)], strict=True)
    )
    meta: Any = dict(axes=self.axes, role=self.role, num_inputs=self.num_inputs)
    self.codes = Codes(codes, packed=format_.packed, **meta)
    self.scales = Constant(scales, axes=of_groups)
    self.steps = Constant(steps[0], axes=of_columns) if steps else None

  def _check(self, size: int, groups: int) -> None:
    format_ = FORMATS[self.name]
    ways = num_shards(activation_axes(self.axes)[self.dim])
    whole = not format_.group or groups % ways == 0
    if not whole or size % (format_.packed * num_shards(self.axes[self.dim])):
      raise ValueError(
        f"finetune.adapter.base={self.name}: the mesh cuts {size} inputs "
        f"({self.axes[self.dim]}) into {num_shards(self.axes[self.dim])} parts, and "
        f"{format_.group_of(size)} of them share a scale, two a byte. Use int8, or a smaller mesh."
      )

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the weight."""
    shape = list(self.codes.shape)
    shape[self.dim] *= self.codes.packed
    return tuple(shape)

  @property
  def ndim(self) -> int:
    """The number of dimensions of the weight."""
    return self.codes.ndim

  @property
  def size(self) -> int:
    """The number of entries of the weight."""
    return self.codes.num_values

  @property
  def num_stacked(self) -> int:
    """As of `Param`."""
    return self.codes.num_stacked

  @property
  def arrays(self) -> tuple[jax.Array, ...]:
    """Codes and scales."""
    return tuple(part[...] for part in self._parts)

  @property
  def arrays_axes(self) -> tuple[tuple[str | None, ...], ...]:
    """Logical axes of `arrays` where the weight is multiplied with."""
    return tuple(activation_axes(part.axes) for part in self._parts)

  @property
  def _parts(self) -> list[Any]:
    return [part for part in (self.codes, self.scales, self.steps) if part is not None]

  def packed(self, dtype: Any) -> Packed:
    """The weight in `dtype`, to multiply with."""
    free = (None,) * (self.ndim - len(self.axes))
    axes = tuple((*free, *of) for of in (*self.arrays_axes, activation_axes(self.axes)))
    return Packed(self.arrays, self.name, self.dim, dtype, axes)

  def of_device(self, arrays: Sequence[jax.Array], dtype: Any) -> tuple[Any, ...]:
    """Inside an island: `arrays` of this weight as one, in front of what else there is."""
    number = len(self._parts)
    return Packed(tuple(arrays[:number]), self.name, self.dim, dtype), *arrays[number:]

  def __getitem__(self, index: Any) -> jax.Array:
    return self.packed(self.dtype).wide()[index]

  @staticmethod
  def products(multiply: Callable, x: jax.Array, layers: Sequence[Linear]) -> tuple[jax.Array, ...]:
    """`multiply(x, weights, stored)` of the layers' weights and of their logical axes."""
    stored = [activation_axes(layer.weight.axes) for layer in layers]
    weights = [layer.weight.packed(x.dtype) for layer in layers]
    product = lambda weights, x: multiply(x, weights, stored)
    # The gradients of adapters are products with `x`.
    keeps_x = any(layer.adapter is not None for layer in layers)
    return Packed.of(product, keeps_args=keeps_x)(weights, x)


def is_layer(x: Any) -> bool:
  """Whether `x` is a layer with a weight, or a variable of none; for `is_leaf`."""
  return isinstance(x, Weight) or is_variable(x)


def quantised(name: str, model: Any) -> Any:
  """The model with its frozen matrices in a format; those that are quantised already stay.

  Raises:
    ValueError: if there is none, or it does not fit the mesh.
  """
  number = 0
  make = jax.jit(lambda weight: Quantised(name, weight))

  def one(layer: Any) -> Any:
    nonlocal number
    if not isinstance(layer, Weight) or layer.weight.role not in OF_MATRICES:
      return layer
    number += isinstance(layer.weight, Quantised)
    if not isinstance(layer.weight, Frozen):
      return layer
    number += 1
    return _with_weight(layer, make(layer.weight))

  model = jax.tree.map(one, model, is_leaf=is_layer)
  if not number:
    raise ValueError(
      f"finetune.adapter.base={name}: no matrix is frozen. Leave matrix and expert out of "
      "finetune.adapter.train."
    )
  return model


@dataclasses.dataclass(frozen=True)
class Arriving:
  """A leaf of an abstract model whose array becomes codes as soon as it is read.

  Attributes:
    shape: of the array.
    dtype: of the array.
    sharding: of the array.
    convert: makes what is kept of one layer's array.
  """

  shape: tuple[int, ...]
  dtype: Any
  sharding: Any
  convert: Callable[[jax.Array], Any]

  @property
  def size(self) -> int:
    """Entries of the array."""
    return math.prod(self.shape)


def arriving(abstract: Any, tuned: Any) -> Any:
  """An abstract base whose matrices are quantised as they are read, each layer by itself.

  Args:
    abstract: the base.
    tuned: the (abstract) model that fine-tuning makes of it, whose weights say their format.
  """

  def one(layer: Any, like: Any) -> Any:
    if not isinstance(layer, Weight) or not isinstance(like.weight, Quantised):
      return layer
    to = like.weight
    meta: Any = dict(axes=to.axes, role=to.role, num_inputs=to.num_inputs)
    convert = jax.jit(lambda array: Quantised(to.name, Frozen(array.astype(to.dtype), **meta)))
    leaf = lambda x: Arriving(x.shape, x.dtype, x.sharding, convert)
    return _with_weight(layer, jax.tree.map(leaf, layer.weight))

  layers, structure = jax.tree.flatten(abstract, is_leaf=is_layer)
  likes = jax.tree.leaves(tuned, is_leaf=is_layer)
  return structure.unflatten(one(*pair) for pair in zip(layers, likes, strict=True))


def arrived(model: Any) -> Any:
  """The model that was read as `arriving` describes it."""

  def one(layer: Any) -> Any:
    if not isinstance(layer, Weight) or not is_variable(layer.weight):
      return layer
    value = layer.weight.get_value()
    return _with_weight(layer, value) if isinstance(value, Quantised) else layer

  return jax.tree.map(one, model, is_leaf=is_layer)


def _with_weight(layer: Weight, weight: Any) -> Weight:
  layer = jax.tree.map(lambda x: x, layer)  # a copy
  layer.weight = weight
  return layer
