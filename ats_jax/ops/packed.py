"""Weights as codes of 8 or 4 bits with scales: encoding, decoding, and products with them.

A code stands for one entry of a weight [..., *inputs, *outputs]. A group of entries has a scale of
its own: in `int8` all inputs of an output, else consecutive ones along the last input dimension
(`dim`, counted from the end). Two codes of 4 bits are a byte: those of neighbours along `dim`.

  int8: round(127 w / s), s the largest absolute value of the group, a float32.
  int4: round(7 w / s) + 8; s as above.
  nf4: the index of the nearest of `NF4`, times s. The scales themselves are quantised (Dettmers et
    al. 2023, arXiv:2305.14314, section 3): 8 bits, and one float32 for all groups of an output.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.sharding.apply import Axes, island

# The quantiles of a normal distribution that QLoRA's appendix E lists, as bitsandbytes has them
# (`get_4bit_type("nf4")` of bitsandbytes/functional.py).
NF4 = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
  -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
  0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
  0.7229568362236023, 1.0,
)  # fmt: skip


class Format(NamedTuple):
  """How codes are stored.

  Attributes:
    packed: codes in a byte.
    group: entries that share a scale, or the greatest common divisor of that and their number; 0 =
      all inputs of an output.
  """

  packed: int
  group: int

  def group_of(self, size: int) -> int:
    """Length of a group along a dimension of `size` entries."""
    return math.gcd(self.group, size)


FORMATS = {"int8": Format(1, 0), "int4": Format(2, 32), "nf4": Format(2, 64)}


def encode(
  name: str, weight: jax.Array, dim: int, largest: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, ...]:
  """Codes, and their scales, of a weight.

  Args:
    name: a key of `FORMATS`.
    weight: local array, whole along `dim`.
    dim: negative.
    largest: takes the largest of all inputs of each output, keeping dimensions.
  """
  w, format_ = weight.astype(jnp.float32), FORMATS[name]
  if name == "int8":
    steps = _nonzero(largest(jnp.abs(w)) / 127)
    return jnp.round(w / steps).astype(jnp.int8), steps
  group = format_.group_of(w.shape[dim])
  grouped = _split(w, dim, group)
  scales = jnp.max(jnp.abs(grouped), dim, keepdims=True)  # [..., groups, 1, ...]
  if name == "int4":
    scales = _nonzero(scales)
    codes = jnp.round(grouped * (7 / scales)).astype(jnp.int32) + 8
    kept = (jnp.squeeze(scales, dim),)
  else:
    of_group = jnp.squeeze(scales, dim)
    steps = _nonzero(largest(of_group) / 255)
    # Rounded up: no entry is beyond the ends of the table.
    parts = jnp.clip(jnp.ceil(of_group / steps), 1, 255).astype(jnp.uint8)
    x = grouped / jnp.expand_dims(parts.astype(jnp.float32) * steps, dim)
    between = [(a + b) / 2 for a, b in itertools.pairwise(NF4)]
    codes = sum(((x > middle).astype(jnp.int32) for middle in between), jnp.int32(0))
    kept = (parts, steps)
  codes = _split(_join(codes, dim), dim, 2)
  low, high = (jax.lax.index_in_dim(codes, n, codes.ndim + dim, keepdims=False) for n in (0, 1))
  return (low + 16 * high).astype(jnp.uint8), *kept


def decode(name: str, arrays: Sequence[jax.Array], dim: int) -> jax.Array:
  """The weight that `encode` made local `arrays` of, in float32: elementwise ops alone."""
  codes, *rest = arrays
  if name == "int8":
    return codes.astype(jnp.float32) * rest[0]
  # No array, which is a constant: jax 0.12.0.1 refuses these in a checkpoint with a tuple of
  # barriers, once it is differentiated.
  shifts = 4 * jax.lax.broadcasted_iota(jnp.uint8, (2, *[1] * (-dim - 1)), 0)
  codes = _join((jnp.expand_dims(codes, dim) >> shifts) & 15, dim)
  if name == "int4":
    values, scales = codes.astype(jnp.float32) - 8, rest[0] * (1 / 7)
  else:
    values, scales = _lookup(codes), rest[0].astype(jnp.float32) * rest[1]
  group = values.shape[dim] // scales.shape[dim]
  return _join(_split(values, dim, group) * jnp.expand_dims(scales, dim), dim)


def _lookup(codes: jax.Array) -> jax.Array:
  """The entry of `NF4` for each code, by its bits: XLA fuses selects, not a gather."""
  # 0, as only XLA finds out: jax would make 16 arrays of constants in front of a loop over layers.
  zero = (codes & 0).astype(jnp.float32)
  values = [zero + np.float32(value) for value in NF4]
  for bit in range(4):
    is_set = (codes & (1 << bit)) != 0
    values = [jnp.where(is_set, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
  return values[0]


def _nonzero(scales: jax.Array) -> jax.Array:
  return jnp.where(scales > 0, scales, 1)


def _split(x: jax.Array, dim: int, size: int) -> jax.Array:
  """Make two dimensions of `dim`; the second one has `size`, and is at `dim`."""
  at = x.ndim + dim
  return x.reshape(*x.shape[:at], -1, size, *x.shape[at + 1 :])


def _join(x: jax.Array, dim: int) -> jax.Array:
  """Make one of `dim` and the dimension before it."""
  at = x.ndim + dim
  return x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["arrays"],
  meta_fields=["name", "dim", "dtype", "axes"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
  """A weight to multiply with, as codes and scales.

  Attributes:
    arrays: as of `encode`.
    name: a key of `FORMATS`.
    dim: see there.
    dtype: of the weight.
    axes: logical axes of each array, and behind them of the weight, where it is multiplied with;
      None = they are local arrays.
  """

  arrays: tuple[jax.Array, ...]
  name: str
  dim: int
  dtype: Any
  axes: tuple[Axes, ...] | None = None

  def wide(self) -> jax.Array:
    """The weight; what shards its storage only is gathered as codes."""
    of_device = lambda *arrays: decode(self.name, arrays, self.dim).astype(self.dtype)
    if self.axes is None:
      return of_device(*self.arrays)
    *inside, out = self.axes
    return island(of_device, in_axes=tuple(inside), out_axes=tuple(out))(*self.arrays)

  @staticmethod
  def of(f: Callable, *, keeps_args: bool = False) -> Callable:
    """The function `f(weights, *args)` of a tuple of packed weights, which have no gradient.

    Reverse mode keeps codes, and decodes them again where it needs the weights.

    Args:
      f: holds no traced array.
      keeps_args: the backward pass needs `args` for something else too. It then decodes once it
        has them, and the weights are in memory for a shorter time.
    """
    return lambda weights, *args: _apply(f, keeps_args, tuple(weights), *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(f, keeps_args, weights, *args):
  # Or XLA would decode the weights of many layers before the first of them is run.
  weights, args = jax.lax.optimization_barrier((weights, args))
  return f(tuple(weight.wide() for weight in weights), *args)


def _apply_bwd(f, keeps_args, kept, dy):
  weights, args = kept
  # Or XLA would find, in layers without a loop, that it has decoded them before, and keep that.
  weights, dy, before = jax.lax.optimization_barrier((weights, dy, args if keeps_args else ()))
  wide, args = tuple(weight.wide() for weight in weights), before or args
  return None, *jax.vjp(lambda *args: f(wide, *args), *args)[1](dy)


def _apply_fwd(f, keeps_args, weights, *args):
  return _apply(f, keeps_args, weights, *args), (weights, args)


_apply.defvjp(_apply_fwd, _apply_bwd)
