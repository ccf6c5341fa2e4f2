"""Parameters and buffers: arrays with their logical axes and their role."""

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
from ats_jax.sharding.apply import (
  check_divisible,
  has_own_sharding,
  num_shards,
  redirect_gradient,
  reshard_part,
)
from ats_jax.sharding.rules import StatePart, spec


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
  ADAPTER = "adapter"  # small matrix beside a frozen one, which reads its input
  ADAPTER_OUT = "adapter's output"  # and the one behind it, which makes its output
  BUFFER = "buffer"  # read by the model, set by the step; no gradient


EXPERTS = "stored_experts"  # the axis that counts them
OF_EXPERTS = frozenset({Role.EXPERT, Role.ADAPTER, Role.ADAPTER_OUT})


class Param(nnx.Param):
  """A trained array.

  `axes` and `role` are static: they belong to the structure of the tree, not to its leaves, so they
  are the same after jit, scan, vmap, eval_shape and jax.tree.map, and in gradients and moments.

  Attributes:
    axes: logical axes (sharding/rules.py) of one layer's array. The array of stacked layers has one
      dimension more, in front: a `jax.vmap` over constructors knows nothing of metadata.
    role: what the parameter does.
    num_inputs: how many of the dimensions of a matrix are those of its input. They stand in front
      of those of its output, and behind that of experts.
  """

  axes: tuple[str, ...]
  role: Role
  num_inputs: int

  def __init__(self, value: Any, *, axes: tuple[str, ...], role: Role, num_inputs: int = 1):
    super().__init__(value, axes=axes, role=role, num_inputs=num_inputs)

  @property
  def num_stacked(self) -> int:
    """How many dimensions count layers or experts: each of their entries is one tensor."""
    return _num_stacked(self)

  @property
  def num_values(self) -> int:
    """The number of parameters."""
    return math.prod(self.shape)


def _num_stacked(v: Any) -> int:
  return v.ndim - len(v.axes) + (v.role in OF_EXPERTS and v.axes[0] == EXPERTS)


class Frozen(nnx.Variable):
  """The array of a parameter that does not train: no gradient, no moments, no reduction.

  Attributes:
    axes: as of `Param`, as all of these are.
    role: what the parameter does.
    num_inputs: how many of its dimensions are those of its input.
  """

  axes: tuple[str, ...]
  role: Role
  num_inputs: int

  @property
  def num_stacked(self) -> int:
    """As of `Param`."""
    return _num_stacked(self)

  @property
  def num_values(self) -> int:
    """As of `Param`."""
    return math.prod(self.shape)

  def thawed(self) -> Param:
    """The parameter, which trains again."""
    value = self.get_value()
    return Param(value, axes=self.axes, role=self.role, num_inputs=self.num_inputs)

  @classmethod
  def of(cls, param: Param) -> "Frozen":
    """The array of a parameter, which trains no more."""
    return cls(param.get_value(), axes=param.axes, role=param.role, num_inputs=param.num_inputs)


class Buffer(nnx.Variable):
  """An array that the model reads and no gradient trains: the step sets it from its statistics.

  Attributes:
    axes: logical axes, as in `Param`.
    role: always `Role.BUFFER`.
  """

  axes: tuple[str | None, ...]
  role: Role

  def __init__(self, value: Any, *, axes: tuple[str | None, ...]):
    super().__init__(value, axes=axes, role=Role.BUFFER)


class Constant(Buffer):
  """A buffer that nothing sets: it belongs to frozen weights, as scales of their codes do."""


def is_variable(x: Any) -> bool:
  """Whether `x` is a parameter, frozen or not, or a buffer, not its array; for `is_leaf`."""
  return isinstance(x, nnx.Variable)


def is_quantised(v: Any) -> bool:
  """Whether a weight is stored as codes (`model.quantised`)."""
  return jnp.issubdtype(v.dtype, jnp.integer)


def role_name(v: Any) -> str:
  """The role of a parameter as settings name it (`config.schema.optimizer.ROLES`)."""
  return v.role.name.lower()


def per_param(f: Callable[[Param], Any], tree: Any) -> Any:
  """Replace each parameter's array by `f(parameter)`, e.g. to make the labels of `optax.partition`.

  Raises:
    TypeError: if a leaf is not the array of a parameter.
  """

  def replace(param: Any) -> Any:
    if not isinstance(param, Param):
      raise TypeError(f"expected a tree of Params, found a leaf of type {type(param).__name__}")
    return jax.tree.map(lambda _: f(param), param)

  return jax.tree.map(replace, tree, is_leaf=is_variable)


def roles(params: Any) -> Any:
  """The role of each parameter, in a tree like `params`."""
  return per_param(lambda param: param.role, params)


def params_of(tree: Any) -> list[Param]:
  """List all parameters of a tree that train."""
  return [v for v in jax.tree.leaves(tree, is_leaf=is_variable) if isinstance(v, Param)]


def weights_of(tree: Any) -> list[Param | Frozen]:
  """List all parameters of a tree, frozen ones too, without buffers."""
  variables = jax.tree.leaves(tree, is_leaf=is_variable)
  return [v for v in variables if isinstance(v, Param | Frozen)]


def trainable(model: Any) -> Any:
  """Replace what does not train by None: buffers and frozen weights; `merge` puts it back."""
  return jax.tree.map(lambda v: None if _is_fixed(v) else v, model, is_leaf=is_variable)


def _is_fixed(v: Any) -> bool:
  return isinstance(v, Buffer | Frozen)


def without_frozen(tree: Any) -> Any:
  """Replace what no step changes by None: frozen weights, and what belongs to them."""
  return jax.tree.map(lambda v: None if _is_frozen(v) else v, tree, is_leaf=is_variable)


def with_frozen(part: Any, whole: Any) -> Any:
  """Combine `part` (like `without_frozen(whole)`) with what is frozen in `whole`."""
  pick = lambda v, p: v if _is_frozen(v) else p
  return jax.tree.map(pick, whole, part, is_leaf=is_variable)


def _is_frozen(v: Any) -> bool:
  return isinstance(v, Frozen | Constant)


def merge(params: Any, model: Any) -> Any:
  """Combine `params` (like `trainable(model)`) with the rest of `model`."""
  copied = lambda v: jax.tree.map(lambda x: x, v)  # a copy: writes do not reach the other model
  pick = lambda v, p: copied(v) if _is_fixed(v) else p
  return jax.tree.map(pick, model, params, is_leaf=is_variable)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredParam:
  """Stands for a parameter's array: computes with a gathered copy, differentiates by the shards.

  Where the weight is used, its gradient is reduce-scattered at once, so the full gradients of all
  layers never exist together (stage 2 of ZeRO).

  Attributes:
    shards: the array that gradients are taken with respect to, sharded as gradients are.
    gathered: the same values, sharded as the weights are.
  """

  shards: jax.Array
  gathered: jax.Array

  def __getitem__(self, index: Any) -> jax.Array:
    spec = jax.typeof(self.shards).sharding.spec
    return redirect_gradient(spec, self.shards, self.gathered)[index]


def reshard_params(part: StatePart, tree: Any) -> Any:
  """Reshard the parameters of a tree to the sharding that the current plan has for `part`."""
  if not has_own_sharding("moments"):  # as in every plan that shards a part otherwise
    return tree

  def replace(param: Any) -> Any:
    if not isinstance(param, Param):
      return param
    # Stages of a pipeline keep their own layers.
    stack = "layers" if num_shards("layers") > 1 else None
    stacked = lambda x: (stack,) * (x.ndim - len(param.axes))
    return jax.tree.map(lambda x: reshard_part(x, part, *stacked(x), *param.axes), param)

  return jax.tree.map(replace, tree, is_leaf=is_variable)


def gradient_shards(params: Any) -> Any:
  """Reshard parameters as the current plan shards gradients, for `with_gradient_shards`."""
  return reshard_params("gradients", params)


def with_gradient_shards(shards: Any, params: Any) -> Any:
  """Make `params` differentiable by their `gradient_shards`.

  Args:
    shards: `gradient_shards(params)`, the argument of `jax.grad`.
    params: the parameters to compute with.
  """
  if not has_own_sharding("gradients"):
    return shards
  both = lambda s, p: jax.tree.map(GatheredParam, s, p)
  return jax.tree.map(both, shards, params, is_leaf=is_variable)


# The setting that gives the length of each logical axis of parameters, for error messages.
_SETTING_OF_AXIS = {
  "vocab": "model.vocab_size",
  "embed": "model.d_model",
  "heads": "model.num_heads",
  "kv_heads": "model.num_kv_heads",
  "latent_rows": "model.kv_latent_dim or q_latent_dim",
  "ff": "model.d_ff",
  "stored_experts": "moe.num_experts + moe.spare_experts",
  "expert_embed": "model.d_model",
}


def initial_sharding(shape: tuple[int, ...], axes: tuple[str, ...], role: Role) -> jax.P:
  """The sharding in which a parameter of one layer is created.

  Raises:
    ValueError: if the current mesh does not divide a dimension.
  """
  settings = _SETTING_OF_AXIS | ({"ff": "moe.d_ff"} if role is Role.EXPERT else {})
  for axis, size in zip(axes, shape, strict=True):
    check_divisible(axis, size, settings.get(axis, axis))
  return spec(*axes)


def normal(
  key: jax.Array,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  std: float,
  dtype: jnp.dtype,
  role: Role,
  num_inputs: int = 1,
) -> Param:
  """Draw a weight from N(0, std^2) in float32, cast to `dtype`, sharded by logical `axes`."""
  value = _draw(key, shape, std, jnp.dtype(dtype), initial_sharding(shape, axes, role))
  return Param(value, axes=axes, role=role, num_inputs=num_inputs)


# One program for each shape, which layers and models share.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw(
  key: jax.Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype, sharding: jax.P
) -> jax.Array:
  value = std * jax.random.normal(key, shape, jnp.float32, out_sharding=sharding)
  return value.astype(dtype)


def ones(shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, role: Role) -> Param:
  """Make a parameter of ones, such as the scale of a norm, sharded by logical `axes`."""
  value = jnp.ones(shape, dtype, out_sharding=initial_sharding(shape, axes, role))
  return Param(value, axes=axes, role=role)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, role: Role) -> Param:
  """Make a parameter of zeros, such as a bias, sharded by logical `axes`."""
  value = jnp.zeros(shape, dtype, out_sharding=initial_sharding(shape, axes, role))
  return Param(value, axes=axes, role=role)


def zero_buffer(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> Buffer:
  """Make a buffer of zeros, sharded by logical `axes`."""
  return Buffer(jnp.zeros(shape, dtype, out_sharding=spec(*axes)), axes=axes)


def residual_std(cfg: ModelConfig) -> float:
  """Std of matrices that write to the residual stream, of which 2 * num_layers add up (GPT-2)."""
  return cfg.init_std / math.sqrt(2 * cfg.num_layers)


def head_std(cfg: ModelConfig) -> float:
  """The std of the output head: logits of a unit-RMS input stay within 0.25, so first loss = ln V.

  The excess over ln V is half the logits' variance, at most 0.03 (our choice; no source). That is
  what `model.head_std=0` stands for.
  """
  return cfg.head_std or min(cfg.init_std, 0.25 / math.sqrt(cfg.d_model))
