"""How one of our arrays stands in a Hugging Face file: invertible, without arithmetic."""

import dataclasses
import math
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


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
    """See `Transform`."""
    return ours

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """See `Transform`."""
    del ours
    return theirs

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """See `Transform`."""
    return ours


@dataclasses.dataclass(frozen=True)
class Flat:
  """All dimensions of ours in one of theirs, e.g. the bias of heads."""

  def their_shape(self, ours: Shape) -> Shape:
    """See `Transform`."""
    return (math.prod(ours),)

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """See `Transform`."""
    return theirs.reshape(ours)

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """See `Transform`."""
    return ours.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Transposed:
  """Ours [*inputs, *outputs] is theirs [outputs, inputs], each side in one dimension.

  Attributes:
    inputs: how many dimensions of ours are contracted.
  """

  inputs: int = 1

  def their_shape(self, ours: Shape) -> Shape:
    """See `Transform`."""
    return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """See `Transform`."""
    return theirs.T.reshape(ours)

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """See `Transform`."""
    return ours.reshape(math.prod(ours.shape[: self.inputs]), -1).T


@dataclasses.dataclass(frozen=True)
class RopeHalves:
  """`Transposed`; the last columns of ours are rotated in pairs (i, i + half), theirs (2i, 2i + 1).

  Attributes:
    rotated: how many columns; of each head, where ours has heads.
  """

  rotated: int

  def their_shape(self, ours: Shape) -> Shape:
    """See `Transform`."""
    return TRANSPOSED.their_shape(ours)

  def to_ours(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
    """See `Transform`."""
    fixed, pairs = self._cut(TRANSPOSED.to_ours(theirs, ours))
    return np.concatenate([fixed, pairs[..., 0::2], pairs[..., 1::2]], axis=-1)

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """See `Transform`."""
    fixed, halves = self._cut(ours)
    pairs = np.stack(np.split(halves, 2, axis=-1), axis=-1).reshape(halves.shape)
    return TRANSPOSED.to_theirs(np.concatenate([fixed, pairs], axis=-1))

  def _cut(self, a: np.ndarray) -> list[np.ndarray]:
    return np.split(a, [a.shape[-1] - self.rotated], axis=-1)


SAME, FLAT, TRANSPOSED, TRANSPOSED_2 = Same(), Flat(), Transposed(), Transposed(2)
