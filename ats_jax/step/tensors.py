"""Reductions over each tensor of a tree of parameters; each layer of a stack is a tensor.

A vector [tensors] has the order of the tree's leaves, and within a leaf that of its layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.layout import stacks
from ats_jax.model.param import Param, params_of
from ats_jax.sharding.apply import replicate


def names(cfg: Config, params: Any) -> list[str]:
  """List the names of tensors as in checkpoints, e.g. "layers/7/attn/q/weight"."""
  result = []
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    for stack, layers in stacks(cfg).items():
      if name.startswith(f"{stack}/"):
        result += [f"layers/{layer}/{name.removeprefix(stack + '/')}" for layer in layers]
        break
    else:
      result.append(name)
  return result


def num_tensors(params: Any) -> int:
  """The number of tensors."""
  return sum(math.prod(_stack_shape(param)) for param in params_of(params))


def squares(params: Any) -> jax.Array:
  """The sum of squares of each tensor, float32 [tensors]."""
  # Behind a barrier, so that the rounding does not depend on what reads the result.
  return jax.lax.optimization_barrier(
    _reduce_each(params, lambda x: jnp.square(x.astype(jnp.float32)))
  )


def norm(params: Any) -> jax.Array:
  """The Euclidean norm of all tensors together, a float32 scalar."""
  return jnp.sqrt(jnp.sum(squares(params)))


def checksums(params: Any) -> jax.Array:
  """The sum of each tensor's bits as integers, uint32 [tensors]; independent of the order."""
  return _reduce_each(params, _bits)


def projections(params: Any, number: int) -> jax.Array:
  """Sums of each tensor with random signs, float32 [number, tensors].

  Of the difference of two such arrays, the mean square over `number` is about the square of the
  norm of the tensors' difference.
  """

  def signed(x: jax.Array, key: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    for dim, size in enumerate(x.shape):
      signs = jax.random.rademacher(jax.random.fold_in(key, dim), (size,), jnp.float32)
      x *= jnp.expand_dims(signs, [d for d in range(x.ndim) if d != dim])
    return x

  one = lambda n: _reduce_each(params, lambda x: signed(x, jax.random.key(n)))
  return jax.lax.map(one, jnp.arange(number))


def odd_copies(params: Any, copied_along: Sequence[str]) -> jax.Array:
  """Which tensors lie on the devices in copies of unequal bits, int32 [tensors].

  0 = all copies are equal; else 1 + the place in the mesh of a device whose copy is not the usual
  one. Of two copies nothing tells which is the usual one.

  Args:
    params: a tree of parameters.
    copied_along: mesh axes along which what is not sharded must be equal.
  """
  mesh = jax.sharding.get_abstract_mesh()

  def odd(param: Param) -> jax.Array:
    x, num_stacked = param[...], len(_stack_shape(param))
    entries = jax.typeof(x).sharding.spec
    names = lambda cut: [n for e in cut if e for n in ((e,) if isinstance(e, str) else e)]
    copies = tuple(n for n in copied_along if mesh.shape[n] > 1 and n not in names(entries))
    stack = jax.P(*entries[:num_stacked])
    if not copies:
      return jnp.zeros(x.shape[:num_stacked], jnp.int32, out_sharding=stack)
    others = tuple(n for n in mesh.axis_names if n not in names(stack))

    def local(x: jax.Array) -> jax.Array:
      own = jnp.sum(_bits(x), axis=tuple(range(num_stacked, x.ndim)), dtype=jnp.uint32)
      each = jax.lax.all_gather(own, copies)
      usual = jnp.sort(each, axis=0)[len(each) // 2]  # that of most, if most agree
      place = jax.lax.axis_index(mesh.axis_names)
      return jax.lax.pmax(jnp.where(own == usual, 0, 1 + place), others)

    return jax.shard_map(local, in_specs=entries, out_specs=stack, check_vma=False)(x)

  return jnp.concatenate([_one_per_layer(odd(param)) for param in params_of(params)])


def squares_and_checksums(x: Any, params: Any, platform: str) -> tuple[jax.Array, jax.Array]:
  """`squares` of one tree and `checksums` of another, of the same shapes.

  On a GPU they are one reduction: XLA updates an array in place in a pass with one reduction of it,
  and copies the array if there are two (jax 0.11.2).
  """
  if platform == "cpu":  # XLA does not vectorise a reduction of two arrays there
    return squares(x), checksums(params)
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])
  zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.uint32)
  sums = []
  for array, param in zip(params_of(x), params_of(params), strict=True):
    both = jnp.square(array[...].astype(jnp.float32)), _bits(param[...])
    axes = range(len(_stack_shape(param)), both[0].ndim)
    sums.append([_one_per_layer(total) for total in jax.lax.reduce(both, zeros, add, tuple(axes))])
  squares_T, sums_T = map(jnp.concatenate, zip(*sums, strict=True))
  return jax.lax.optimization_barrier((squares_T, sums_T))


def scaled(params: Any, factor_T: jax.Array) -> Any:
  """Multiply each tensor by its factor, in the dtype of the tensor."""
  leaves, structure = jax.tree.flatten(params)
  factors, first = [], 0
  for param, x in zip(params_of(params), leaves, strict=True):
    lead = _stack_shape(param)
    factor = factor_T[first : first + math.prod(lead)].reshape(lead + (1,) * (x.ndim - len(lead)))
    factors.append(factor.astype(x.dtype))
    first += math.prod(lead)
  # Behind a barrier: XLA would fuse all readers of one vector into one pass.
  factors = jax.lax.optimization_barrier(factors)
  return structure.unflatten([x * f for x, f in zip(leaves, factors, strict=True)])


def _stack_shape(param: Param) -> tuple[int, ...]:
  """The shape in front of a layer's own axes: [layers] in a stack, else []."""
  shape = jnp.shape(param[...])
  return shape[: len(shape) - len(param.axes)]


def _reduce_each(params: Any, f: Any) -> jax.Array:
  sums = []
  for param in params_of(params):
    x = f(param[...])
    lead = len(_stack_shape(param))
    sums.append(_one_per_layer(jnp.sum(x, axis=tuple(range(lead, x.ndim)), dtype=x.dtype)))
  return jnp.concatenate(sums)


def _one_per_layer(total: jax.Array) -> jax.Array:
  """Flatten totals to one number for each layer, replicated over the stages."""
  return replicate(total.reshape(-1))


def _bits(x: jax.Array) -> jax.Array:
  bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32)
