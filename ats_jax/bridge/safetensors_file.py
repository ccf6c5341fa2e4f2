"""Files of the format safetensors: eight bytes of length, a JSON header, then the arrays' bytes.

The library of that name maps files into memory, whose pages then count as the process's, and writes
only arrays that are all in memory. Here one tensor is, both ways.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import ml_dtypes
import numpy as np

from ats_jax.bridge.transforms import in_order
from ats_jax.store import paths

MAX_HEADER = 100_000_000  # bytes, as in the library
DTYPES: Mapping[str, np.dtype] = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Of what is read as a part of something else only.
PARTS: Mapping[str, np.dtype] = {
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "U8": np.dtype(np.uint8),
}
_ALL = {**DTYPES, **PARTS}
NAMES = {dtype: name for name, dtype in _ALL.items()}


class Stored(Protocol):
  """A tensor of a folder: one in a file, or what several make together."""

  @property
  def path(self) -> Path:
    """File to name."""
    ...

  @property
  def dtype(self) -> str:
    """In the words of the format."""
    ...

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the array."""
    ...

  @property
  def nbytes(self) -> int:
    """Bytes in files."""
    ...

  def read(self) -> np.ndarray:
    """The array, in memory of its own."""
    ...


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a tensor lies.

  Attributes:
    path: path of the file.
    dtype: in the words of the format, e.g. "BF16".
    shape: shape of the array.
    start: offset of its bytes in the file.
    nbytes: number of its bytes.
  """

  path: Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  nbytes: int

  def read(self) -> np.ndarray:
    """Read it into memory of its own.

    Raises:
      ValueError: if the file ends before it does.
    """
    raw = np.empty(self.nbytes, np.uint8)
    with open(self.path, "rb", buffering=0) as file:
      file.seek(self.start)
      view, got = memoryview(raw), 0
      while got < self.nbytes:
        count = file.readinto(view[got:])
        if not count:
          raise ValueError(f"{self.path} became shorter while it was read. Copy it again.")
        got += count
    return raw.view(_ALL[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
  """The tensors of a file by name; their bytes are not read.

  Raises:
    ValueError: if it is truncated, or is no such file.
  """
  size = path.stat().st_size
  with path.open("rb") as file:
    if pointer := paths.lfs_pointer(file.read(64)):
      raise ValueError(f"{path} is {pointer}.")
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
      raise ValueError(
        f"{path} is truncated or is no safetensors file: its {size:,} bytes do not hold the header "
        f"of {length:,} that it begins with. Copy it again."
      )
    text = file.read(length)
  try:
    entries = paths.parse_json(text)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, 8 + length, entry) for name, entry in entries.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(f"{path} has a header that cannot be read: {e!r}. Copy it again.") from e
  end = 0
  for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
    if tensor.start < end:
      raise ValueError(f"{path}: the bytes of tensor {name} are those of another one too.")
    end = tensor.start + tensor.nbytes
    if tensor.dtype in _ALL and tensor.nbytes != _nbytes(tensor.dtype, tensor.shape):
      raise ValueError(f"{path}: tensor {name} has {tensor.nbytes} bytes for {tensor.shape}.")
    if tensor.start + tensor.nbytes > size:
      raise ValueError(
        f"{path} is truncated: tensor {name} ends at byte {tensor.start + tensor.nbytes:,}, the "
        f"file at {size:,}. Copy it again."
      )
  return tensors


def _tensor(path: Path, data_start: int, entry: Mapping[str, Any]) -> Tensor:
  begin, end = entry["data_offsets"]
  dtype, shape = entry["dtype"], tuple(entry["shape"])
  if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)) or begin > end:
    raise ValueError(f"offsets {begin}, {end} and shape {shape}")
  if not isinstance(dtype, str):
    raise ValueError(f"dtype {dtype!r}")
  return Tensor(path, dtype, shape, data_start + begin, end - begin)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
  return math.prod(shape) * _ALL[dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Slot:
  """A tensor to write: its name, dtype and shape."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    """Its bytes in the file."""
    return math.prod(self.shape) * self.dtype.itemsize


class Writer:
  """Writes one file, tensor by tensor in the order of its slots; a context manager.

  The file gets its name when it is complete.
  """

  def __init__(self, path: Path, slots: list[Slot]):
    self.path, self._left = path, list(slots)
    self._part = path.with_name(path.name + ".part")
    self._file: BinaryIO | None = None
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in slots:
      offsets = [at, at + slot.nbytes]
      dtype, shape = NAMES[slot.dtype], list(slot.shape)
      entries[slot.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
      at += slot.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    self._header = text + b" " * (-len(text) % 8)

  def __enter__(self) -> Self:
    self._file = self._part.open("wb")
    self._file.write(len(self._header).to_bytes(8, "little") + self._header)
    return self

  def write(self, name: str, array: np.ndarray) -> None:
    """Write the next tensor."""
    assert self._file is not None
    slot = self._left.pop(0)
    assert (slot.name, slot.shape, slot.dtype) == (name, array.shape, array.dtype), (slot, name)
    self._file.write(memoryview(in_order(array).reshape(-1).view(np.uint8)))

  def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
    assert self._file is not None
    with self._file as file:
      file.flush()
      os.fsync(file.fileno())
    if kind is None:
      assert not self._left, f"{self.path} misses {self._left[0].name}"
      self._part.rename(self.path)
