"""Numbers as 8-bit codes by the dynamic maps of Dettmers et al. 2022 (arXiv:2110.02861).

A map has seven decades below 1, each of twice as many equal cells as the one below it, whose
centres are its values, and also 0 and 1 (section 2.2; `create_dynamic_map` of bitsandbytes). The
signed map, of [-1, 1], has the negatives of all values but -1 too; the unsigned one, of [0, 1], has
twice as many values in each decade instead.

    signed    0 = 0    1 ... 127, 128 = 1    129 ... 255 = the negatives of 127 ... 1
    unsigned  0 = 0    1 ... 254, 255 = 1

These are the values of bitsandbytes in another order: 0 is 0, so that arrays of zeros are zeros.

Codes are computed, not looked up. The cells of a decade are equal and, e being the decade, number
2^e to 2^(e+1) - 1 through, so the cell of a number is a product, a sum and a floor, and its centre
is an integer times a constant of the decade. A search in the table would take eight loads, each of
which waits for the one before it; the loads of one table for random codes are spread over its eight
cache lines. The selects by decade are arithmetic of registers, which is hidden behind the loads of
moments and gradients, and elementwise, so it is legal for any sharding and fuses.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

DECADES = 7
LEAST = -(1.0 - 0.45 / 64)  # the smallest value of the signed map
# The smallest share of a positive number that is left of it where it is rounded down, by the
# unsigned map: between the last value of its first decade and the next one.
LEAST_SHARE = 2.0 * 0.775 / (0.775 + 2.125)


class _Map(NamedTuple):
  """Constants of a map whose positive values are numbered from 2^first to 2^(first + 7).

  Attributes:
    starts: the number of the first value of each decade.
    units: values of a decade are integers times this one.
    edges: the least number of each decade: the middle between values.
    cells: how many cells of a decade there are in 1.
    top: the least number that is nearest to 1.
  """

  starts: tuple[float, ...]
  units: tuple[float, ...]
  edges: tuple[float, ...]
  cells: tuple[float, ...]
  top: float


@functools.cache
def _map(first: int) -> _Map:
  """From the centres of the first and the last cell of each decade."""
  decades = range(first, first + DECADES)
  sizes = [10.0 ** (e - decades[-1]) for e in decades]  # of the upper ends
  units = [size / (20.0 * 2**e) for e, size in zip(decades, sizes, strict=True)]
  ends = [(1.0 - 0.45 / 2**e) * size for e, size in zip(decades, sizes, strict=True)]
  begins = [(0.1 + 0.45 / 2**e) * size for e, size in zip(decades, sizes, strict=True)]
  edges = [0.5 * (a + b) for a, b in zip([0.0, *ends], [*begins, 1.0], strict=True)]
  cells = [2**e / (0.9 * size) for e, size in zip(decades, sizes, strict=True)]
  starts = [2.0**e for e in decades]
  return _Map(tuple(starts), tuple(units), tuple(edges[:-1]), tuple(cells), edges[-1])


def _select(x: jax.Array, edges: tuple[float, ...], values: tuple[float, ...]) -> jax.Array:
  """The value of the last edge that `x` is not below; the first one for all that are below."""
  found = jnp.full_like(x, values[0], dtype=jnp.float32)
  for edge, value in zip(edges[1:], values[1:], strict=True):
    found = jnp.where(x >= edge, jnp.float32(value), found)
  return found


def _value(number: jax.Array, first: int) -> jax.Array:
  """The positive value of a number, int32."""
  of, x = _map(first), number.astype(jnp.float32)
  unit = _select(x, of.starts, of.units)
  # The power of two below, by the bits of the exponent.
  exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFF << 23)
  start = jax.lax.bitcast_convert_type(exponent, jnp.float32)
  # An integer of at most 12 bits times a constant: one rounding, whatever XLA fuses it with.
  value = (18.0 * x + 9.0 - 16.0 * start) * unit
  return jnp.where(number == 2 ** (first + DECADES), 1.0, value)


def _nearest(x: jax.Array, first: int) -> jax.Array:
  """The number, int32, of the positive value that is nearest to `x` of [0, 1]."""
  of = _map(first)
  start, cells = _select(x, of.edges, of.starts), _select(x, of.edges, of.cells)
  cell = jnp.clip(jnp.floor(x * cells - start * (1.0 / 9.0)), 0.0, start - 1.0)
  number = (start + cell).astype(jnp.int32)
  return jnp.where(x >= of.top, 2 ** (first + DECADES), number)


def decode_signed(codes: jax.Array) -> jax.Array:
  """The values, float32 of [-1, 1], of codes of the signed map, uint8."""
  number = codes.astype(jnp.int32)
  is_negative = number > 128
  size = _value(jnp.where(is_negative, 256 - number, number), 0)
  return jnp.where(number == 0, 0.0, jnp.where(is_negative, -size, size))


def encode_signed(x: jax.Array) -> jax.Array:
  """The codes, uint8, of the values of the signed map that are nearest to `x`, float32.

  -1 is not among the values: what is below the least one gets that.
  """
  size = jnp.abs(x)
  number = _nearest(size, 0)
  number = jnp.where(x < 0.0, 256 - jnp.minimum(number, 127), number)
  return jnp.where(size < _map(0).edges[0], 0, number).astype(jnp.uint8)


def decode_unsigned(codes: jax.Array) -> jax.Array:
  """The values, float32 of [0, 1], of codes of the unsigned map, uint8."""
  return jnp.where(codes == 0, 0.0, _value(codes.astype(jnp.int32) + 1, 1))


def encode_unsigned(x: jax.Array) -> jax.Array:
  """The codes, uint8, of the values of the unsigned map that are nearest to `x`, float32.

  Only 0 becomes 0: a positive number is at least the smallest value.
  """
  return jnp.where(x > 0.0, _nearest(x, 1) - 1, 0).astype(jnp.uint8)
