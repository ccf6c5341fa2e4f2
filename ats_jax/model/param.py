"""Parameters that know what they are: their logical axes and their role, beside the array."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import ModelConfig
from ats_jax.sharding.apply import check_cut, is_apart, num_shards, reshard_part, standing_for
from ats_jax.sharding.rules import Part, spec


class Role(enum.StrEnum):
  """What a parameter does. Optimizers, sharding checks and surgery ask this, never a name."""

  MATRIX = "matrix"  # of a layer that every token of the layer is multiplied with
  EXPERT = "expert stack"  # [experts, in, out]
  ROUTER = "router"  # scores experts, or tokens
  EMBEDDING = "embedding"  # rows looked up by token; the head's too where they are tied
  HEAD = "head"
  NORM = "norm"
  BIAS = "bias"
  SINK = "sink"  # a learned logit that takes attention from the keys
  SCALAR = "scalar"
  ADAPTER = "adapter"  # small matrices beside a frozen one
  BUFFER = "buffer"  # read by the model, set by the step; no gradient


class Param(nnx.Param):
  """A trained array.

  `axes` and `role` are static: they belong to the structure of the tree, not to its leaves, so they
  are the same after jit, scan, vmap, eval_shape and jax.tree.map, and in gradients and moments.

  Attributes:
    axes: logical axes (sharding/rules.py) of one layer's array. The array of stacked layers has one
      dimension more, in front: a `jax.vmap` over constructors knows nothing of metadata.
    role: what it does.
  """

  axes: tuple[str, ...]
  role: Role

  def __init__(self, value: Any, *, axes: tuple[str, ...], role: Role):
    super().__init__(value, axes=axes, role=role)


class Buffer(nnx.Variable):
  """An array that the model reads and no gradient trains: the step sets it from its statistics.

  Attributes:
    axes: as of a `Param`.
    role: `Role.BUFFER`.
  """

  axes: tuple[str | None, ...]
  role: Role

  def __init__(self, value: Any, *, axes: tuple[str | None, ...]):
    super().__init__(value, axes=axes, role=Role.BUFFER)


def is_variable(x: Any) -> bool:
  """For `is_leaf`: whether `x` is a parameter or buffer, and not its array."""
  return isinstance(x, nnx.Variable)


def per_param(f: Callable[[Param], Any], tree: Any) -> Any:
  """`tree` with `f(parameter)` in place of each parameter's array, e.g. `optax.partition`'s labels.

  Raises:
    TypeError: if a leaf is not the array of a parameter.
  """

  def one(param: Any) -> Any:
    if not isinstance(param, Param):
      raise TypeError(f"expected a tree of Params, found a leaf of type {type(param).__name__}")
    return jax.tree.map(lambda _: f(param), param)

  return jax.tree.map(one, tree, is_leaf=is_variable)


def roles(params: Any) -> Any:
  """The role of each parameter, in a tree like `params`."""
  return per_param(lambda param: param.role, params)


def params_of(tree: Any) -> list[Param]:
  """All parameters of a tree; buffers are none."""
  return [v for v in jax.tree.leaves(tree, is_leaf=is_variable) if isinstance(v, Param)]


def trainable(model: Any) -> Any:
  """The model with None in place of its buffers; `merge` undoes it."""
  return jax.tree.map(lambda v: None if isinstance(v, Buffer) else v, model, is_leaf=is_variable)


def merge(params: Any, model: Any) -> Any:
  """`params` (like `trainable(model)`) with the buffers of `model`."""
  copied = lambda v: jax.tree.map(lambda x: x, v)  # a copy: writes do not reach the other model
  pick = lambda v, p: copied(v) if isinstance(v, Buffer) else p
  return jax.tree.map(pick, model, params, is_leaf=is_variable)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
  """In the place of a parameter's array: whole to compute with, shards to differentiate by.

  Wherever the weight is used, its gradient is summed over the devices and scattered: that of all
  layers is never whole at once.
  """

  shards: jax.Array
  whole: jax.Array

  def __getitem__(self, index: Any) -> jax.Array:
    cut = jax.typeof(self.shards).sharding.spec
    return standing_for(cut, self.shards, self.whole)[index]


def cut_as(part: Part, tree: Any) -> Any:
  """`tree` with each parameter's array sharded as the plan in use says of a part of the state."""
  if not is_apart("moments"):  # as in every plan that shards a part otherwise
    return tree

  def one(param: Any) -> Any:
    if not isinstance(param, Param):
      return param
    # Stages of a pipeline keep their own layers.
    stack = "layers" if num_shards("layers") > 1 else None
    stacked = lambda x: (stack,) * (x.ndim - len(param.axes))
    return jax.tree.map(lambda x: reshard_part(x, part, *stacked(x), *param.axes), param)

  return jax.tree.map(one, tree, is_leaf=is_variable)


def shards_of_gradients(params: Any) -> Any:
  """What to differentiate by, so that gradients are sharded as the plan says; see `lent`."""
  return cut_as("gradients", params)


def lent(shards: Any, params: Any) -> Any:
  """`params` to compute with, differentiable by `shards` (`shards_of_gradients`)."""
  if not is_apart("gradients"):
    return shards
  both = lambda s, p: jax.tree.map(Whole, s, p)
  return jax.tree.map(both, shards, params, is_leaf=is_variable)


# The setting that a logical axis of a parameter has its length from.
_SETTINGS = {
  "vocab": "model.vocab_size",
  "embed": "model.d_model",
  "heads": "model.num_heads",
  "kv_heads": "model.num_kv_heads",
  "latent_rows": "model.kv_latent_dim or q_latent_dim",
  "ff": "model.d_ff",
  "stored_experts": "moe.num_experts + moe.spare_experts",
  "expert_embed": "model.d_model",
}


def born_cut(shape: tuple[int, ...], axes: tuple[str, ...], role: Role) -> jax.P:
  """The sharding that a parameter of one layer is born in.

  Raises:
    ValueError: if the current mesh does not divide a dimension.
  """
  settings = _SETTINGS | ({"ff": "moe.d_ff"} if role is Role.EXPERT else {})
  for axis, size in zip(axes, shape, strict=True):
    check_cut(axis, size, settings.get(axis, axis))
  return spec(*axes)


def normal(
  key: jax.Array,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  std: float,
  dtype: jnp.dtype,
  role: Role,
) -> Param:
  """Draw a weight from N(0, std^2) in float32, cast to `dtype`, sharded by logical `axes`."""
  value = _draw(key, shape, std, jnp.dtype(dtype), born_cut(shape, axes, role))
  return Param(value, axes=axes, role=role)


# One program for each shape, which layers and models share.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw(
  key: jax.Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype, sharding: jax.P
) -> jax.Array:
  value = std * jax.random.normal(key, shape, jnp.float32, out_sharding=sharding)
  return value.astype(dtype)


def ones(shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, role: Role) -> Param:
  """A vector of ones, e.g. the scale of a norm."""
  value = jnp.ones(shape, dtype, out_sharding=born_cut(shape, axes, role))
  return Param(value, axes=axes, role=role)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, role: Role) -> Param:
  """A vector of zeros, e.g. a bias."""
  value = jnp.zeros(shape, dtype, out_sharding=born_cut(shape, axes, role))
  return Param(value, axes=axes, role=role)


def zero_buffer(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> Buffer:
  """A buffer of zeros."""
  return Buffer(jnp.zeros(shape, dtype, out_sharding=spec(*axes)), axes=axes)


def residual_std(cfg: ModelConfig) -> float:
  """Std of matrices that write to the residual stream: 2 * num_layers of them add up (GPT-2)."""
  return cfg.init_std / math.sqrt(2 * cfg.num_layers)


def head_std(cfg: ModelConfig) -> float:
  """Std of the output head: logits of a unit-RMS input stay within 0.25, so first loss = ln V.

  The excess over ln V is half the logits' variance, at most 0.03 (our choice; no source).
  """
  return min(cfg.init_std, 0.25 / math.sqrt(cfg.d_model))
