"""How one of our arrays stands in a Hugging Face file: invertible, without arithmetic."""

import concurrent.futures
import dataclasses
import math
import os
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]
# Numpy follows one side's order and touches a cache line of the other for each element. So a
# transpose goes by tiles.
TILE_BYTES = 32  # of a row
TILE_ROWS = 512


def in_order(array: np.ndarray) -> np.ndarray:
  """The same array in C order, itself if it is: `np.ascontiguousarray`, several times as fast."""
  if array.flags.c_contiguous:
    return array
  if array.ndim < 2:
    return array.copy()
  ordered = np.empty(array.shape, array.dtype)
  # Of plain words numpy releases the lock of Python.
  source, target = (a.view(f"u{array.itemsize}") for a in (array, ordered))
  width = TILE_BYTES // array.itemsize

  def copy(first: int) -> None:
    rows = slice(first, first + TILE_ROWS)
    for left in range(0, array.shape[-1], width):
      tile = (rows, ..., slice(left, left + width))
      target[tile] = source[tile]

  with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), "transpose") as pool:
    for _ in pool.map(copy, range(0, len(array), TILE_ROWS)):
      pass
  return ordered


class Transform(Protocol):
  """A bijection between our array and theirs, decided by our shape."""

  def their_shape(self, ours: Shape) -> Shape:
    """Shape of their array."""
    ...

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """Our array of shape `ours`, maybe a view."""
    ...

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """Their array, maybe a view."""
    ...


@dataclasses.dataclass(frozen=True)
class Same:
  """The same array."""

  def their_shape(self, ours: Shape) -> Shape:
    """Return the shape of their array for our shape."""
    return ours

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """Return our array, of shape `ours`; maybe a view."""
    del ours
    return theirs

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """Return their array; maybe a view."""
    return ours


@dataclasses.dataclass(frozen=True)
class Flat:
  """All dimensions of ours in one of theirs, e.g. the bias of heads."""

  def their_shape(self, ours: Shape) -> Shape:
    """Return the shape of their array for our shape."""
    return (math.prod(ours),)

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """Return our array, of shape `ours`; maybe a view."""
    return theirs.reshape(ours)

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """Return their array; maybe a view."""
    return ours.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Transposed:
  """Ours [*inputs, *outputs] is theirs [outputs, inputs], each side in one dimension.

  Attributes:
    inputs: number of dimensions of ours that are contracted.
  """

  inputs: int = 1

  def their_shape(self, ours: Shape) -> Shape:
    """Return the shape of their array for our shape."""
    return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """Return our array, of shape `ours`; maybe a view."""
    return theirs.T.reshape(ours)

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """Return their array; maybe a view."""
    return ours.reshape(math.prod(ours.shape[: self.inputs]), -1).T


@dataclasses.dataclass(frozen=True)
class Interleaved:
  """One of several arrays of ours whose columns take turns in theirs.

  Attributes:
    first: index of the column of theirs that is our first.
    of: number of arrays that take turns.
  """

  first: int
  of: int = 2

  def their_shape(self, ours: Shape) -> Shape:
    """Return the shape of their array for our shape."""
    return *ours[:-1], self.of * ours[-1]

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """Return our array, of shape `ours`; maybe a view."""
    del ours
    return theirs[..., self.first :: self.of]

  def put(self, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Write our columns into theirs, of which the other arrays write the rest."""
    theirs[..., self.first :: self.of] = ours


@dataclasses.dataclass(frozen=True)
class RopeHalves:
  """`Transposed`; the last columns of ours are rotated in pairs (i, i + half), theirs (2i, 2i + 1).

  Attributes:
    rotated: how many columns; of each head, where ours has heads.
  """

  rotated: int

  def their_shape(self, ours: Shape) -> Shape:
    """Return the shape of their array for our shape."""
    return TRANSPOSED.their_shape(ours)

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """Return our array, of shape `ours`; maybe a view."""
    fixed, pairs = self._cut(TRANSPOSED.to_ours(theirs, ours))
    return np.concatenate([fixed, pairs[..., 0::2], pairs[..., 1::2]], axis=-1)

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """Return their array; maybe a view."""
    fixed, halves = self._cut(ours)
    pairs = np.stack(np.split(halves, 2, axis=-1), axis=-1).reshape(halves.shape)
    return TRANSPOSED.to_theirs(np.concatenate([fixed, pairs], axis=-1))

  def _cut(self, a: np.ndarray) -> list[np.ndarray]:
    return np.split(a, [a.shape[-1] - self.rotated], axis=-1)


SAME, FLAT, TRANSPOSED, TRANSPOSED_2 = Same(), Flat(), Transposed(), Transposed(2)
