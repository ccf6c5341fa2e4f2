"""What filters have said so far, written down now and then, so that a kill costs little."""

import os
import zipfile
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ats_jax.data.filters.duplicates import NUM_HASHES
from ats_jax.data.filters.judge import DocumentHead, Verdicts

PART_CHARS = 2**26  # of documents that are judged before it is written down
PART_DOCUMENTS = 2**17
COLUMNS = {"file": "i", "line": "q", "key": "Q", "chars": "q"}


class Document(NamedTuple):
  """One to be judged.

  Attributes:
    file: the number of its file.
    line: number of its record in the file.
    key: the hash of its name.
    chars: characters.
    head: the part of it that filters judge.
  """

  file: int
  line: int
  key: int
  chars: int
  head: DocumentHead


class Parts:
  """Files of verdicts in a folder, in order.

  Attributes:
    documents: number of documents that were judged.
    complete: whether those are all.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    self._count, self.documents, self.complete = 0, 0, False
    for leftover in folder.glob("*.tmp"):
      leftover.unlink()
    while not self.complete and (size := _size(self._path(self._count))):
      self._count += 1
      self.documents += size[0]
      self.complete = size[1]
    self._open()

  def _path(self, number: int) -> Path:
    return self._folder / f"judged-{number:05}.npz"

  def _open(self) -> None:
    self._columns = {name: array(code) for name, code in COLUMNS.items()}
    self._judged: list[Verdicts] = []

  def add(self, batch: list[Document], judged: Verdicts) -> None:
    """Append a batch; a part that is full is written."""
    for document in batch:
      for name, column in self._columns.items():
        column.append(getattr(document, name))
    self._judged.append(judged)
    self.documents += len(batch)
    chars = self._columns["chars"]
    if len(chars) >= PART_DOCUMENTS or sum(chars) >= PART_CHARS:
      self.close(last=False)

  def close(self, *, last: bool) -> None:
    """Write a part, all of it or nothing."""
    path = self._path(self._count)
    unfinished = path.with_suffix(".tmp")
    judged = _together(self._judged)
    columns = {f"column_{name}": np.array(values) for name, values in self._columns.items()}
    with open(unfinished, "wb") as file:
      np.savez(file, allow_pickle=False, last=np.array(last), **columns, **judged._asdict())
      file.flush()
      os.fsync(file.fileno())
    unfinished.replace(path)
    self._count += 1
    self._open()

  def joined(self) -> tuple[dict[str, np.ndarray], Verdicts, np.ndarray]:
    """The columns of all documents, what was said of them, and their signatures on disk."""
    columns = {name: [np.empty(0, np.dtype(code))] for name, code in COLUMNS.items()}
    judged: list[Verdicts] = []
    empty = np.empty((0, NUM_HASHES), np.uint32)
    with open(self._folder / "near.bin", "wb") as near:
      for number in range(self._count):
        with np.load(self._path(number)) as part:
          for name, values in columns.items():
            values.append(part[f"column_{name}"])
          near.write(part["near"].tobytes())
          some = {name: part[name] for name in Verdicts._fields if name != "near"}
          judged.append(Verdicts(**some, near=empty))
      size = near.tell()
    path = self._folder / "near.bin"
    signatures = np.memmap(path, np.uint32, "r").reshape(-1, NUM_HASHES) if size else empty
    return {n: np.concatenate(v) for n, v in columns.items()}, _together(judged), signatures

  def remove(self) -> None:
    """Take away all that served to get here."""
    for number in reversed(range(self._count)):  # so that what is left is a beginning
      self._path(number).unlink()
    (self._folder / "near.bin").unlink()


def _size(path: Path) -> tuple[int, bool] | None:
  """How many documents a part holds, and whether it is the last; None = it is not whole."""
  try:
    with np.load(path) as part:
      arrays = {name: part[name] for name in part.files}  # which compares their checksums
      return len(arrays["stage"]), bool(arrays["last"])
  except (FileNotFoundError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
    return None


def _together(judged: list[Verdicts]) -> Verdicts:
  table: dict[str, int] = {"": 0}
  reason = [np.empty(0, np.int32)]
  for part in judged:
    places = [table.setdefault(str(name), len(table)) for name in part.reasons]
    reason.append(np.array(places, np.int32)[part.reason])
  parts = zip(*judged, strict=True) if judged else _NOTHING
  by_name = {name: np.concatenate(some) for name, some in zip(Verdicts._fields, parts, strict=True)}
  return Verdicts(**{**by_name, "reasons": np.array(list(table)), "reason": np.concatenate(reason)})


_NOTHING = tuple(
  [np.empty((0, *shape), kind)]
  for shape, kind in (
    ((), np.str_), ((), np.int16), ((), np.int32), ((), bool), ((2,), np.uint64),
    ((NUM_HASHES,), np.uint32),
  )
)  # fmt: skip
