"""Shards of token ids on disk: made durable one after the other, each with a part of the index."""

import contextlib
import hashlib
import itertools
import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from absl import logging

from ats_jax.data.corpus import cache
from ats_jax.data.text.formats.token_files import token_dtype
from ats_jax.data.text.source import SourceFile, document_name, name_hash

SHARD_TOKENS = 2**26  # of a shard at least, but for the last one
_USED_IDS = 2**22  # looked at together
# One entry per document; 48 bytes of memory each while a corpus is read.
COLUMNS = {"file": "i", "line": "q", "part": "i", "start": "q", "length": "q", "num_bytes": "q",
            "key": "Q"}  # fmt: skip


class TokeniseOptions(NamedTuple):
  """How a corpus is tokenised. Only `copies_ids` changes the result.

  Attributes:
    workers: number of processes that encode; 0 = this process does.
    copies_ids: whether the ids of token files are copied into the shards, so that the corpus does
      not need those files any more.
    say: is called with a line that says how far the work is.
    every_secs: seconds between two such lines.
  """

  workers: int = 0
  copies_ids: bool = False
  say: Callable[[str], None] = logging.info
  every_secs: float = 15.0


DEFAULT_OPTIONS = TokeniseOptions()


def ids_path(folder: Path, number: int) -> Path:
  """Return the path of a shard's token ids."""
  return folder / f"tokens-{number:05}.bin"


class EncodedPiece(NamedTuple):
  """The ids of a document, or of a part of one, on their way into the shards.

  Attributes:
    file: index of its file.
    line: number of its record in the file.
    starts: whether it is the first part of its document.
    ids: [tokens] integers.
    num_bytes: UTF-8 bytes of its text; 0 = unknown.
    part: which part of its document it is, as of `formats.text.Piece`.
    codes: [tokens] uint8, the codes of a conversation's tokens (`chat.segments`); None = a text.
  """

  file: int
  line: int
  starts: bool
  ids: np.ndarray
  num_bytes: int
  part: int = 0
  codes: np.ndarray | None = None


def codes_path(folder: Path, number: int) -> Path:
  """Return the path of the codes of a shard's ids, which a corpus of conversations has."""
  return folder / f"codes-{number:05}.bin"


class Shards:
  """Writes shards, each with a part of the columns, which `finish` joins.

  Attributes:
    complete: whether those that were there before are all.
    refused: (kind, where, detail) of records that became malformed as they were encoded.
  """

  def __init__(
    self, folder: Path, files: list[SourceFile], vocab_size: int, options: TokeniseOptions
  ):
    self._folder, self._files = folder, files
    self._dtype = token_dtype(vocab_size)
    self._done = self._intact()
    self._batches = sum(part["batches"] for part in self._done)
    self.refused = [tuple(problem) for part in self._done for problem in part["refused"]]
    self.complete = bool(self._done) and self._done[-1]["last"]
    self._num_tokens = sum(part["tokens"] for part in self._done)
    self._used = np.zeros(vocab_size, bool)
    self._out: BinaryIO | None = None
    self._codes: BinaryIO | None = None
    self._progress = _Progress(files, options)
    for leftover in folder.glob("*.tmp"):
      leftover.unlink()
    if not self.complete:
      self._open()

  def _path(self, number: int, kind: str) -> Path:
    return self._folder / f"{kind}-{number:05}.{'npz' if kind == 'columns' else 'json'}"

  def _intact(self) -> list[dict[str, Any]]:
    """What is said of the finished shards, up to the first that is not as it was written."""
    done = []
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
      while True:
        number = len(done)
        part = json.loads(self._path(number, "part").read_text())
        for name, sha256 in part["sha256"].items():
          with open(self._folder / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
              return done
        done.append(part)
    return done

  def _open(self) -> None:
    self._columns = {name: array(code) for name, code in COLUMNS.items()}
    self._added = self._tokens = 0  # batches and ids of this shard
    self._continued = [0, 0]  # ids and bytes of a document that began in the last shard
    self._refused: list[tuple[str, str, str]] = []  # of this shard
    self._out = open(ids_path(self._folder, len(self._done)), "wb")  # noqa: SIM115
    self._codes = None

  def skip_held(self, batches: Iterator[Any]) -> int:
    """Take from `batches` those that the shards hold; return how many more they hold."""
    return self._batches - sum(1 for _ in itertools.islice(batches, self._batches))

  def add(
    self,
    entries: Iterable[EncodedPiece],
    ids: np.ndarray,
    refused: Sequence[tuple[str, str, str]] = (),
  ) -> None:
    """Append a batch; a shard that is full is closed.

    Args:
      entries: of the batch.
      ids: of all of them.
      refused: as the attribute, of the batch.
    """
    assert self._out is not None
    self.use(ids)
    columns = self._columns
    for entry in entries:
      if entry.starts:
        self._append(entry.file, entry.line, entry.part, self._num_tokens + self._tokens, 0)
      if columns["length"]:
        columns["length"][-1] += len(entry.ids)
        columns["num_bytes"][-1] += entry.num_bytes
      else:
        self._continued = [
          self._continued[0] + len(entry.ids), self._continued[1] + entry.num_bytes
        ]  # fmt: skip
      self._tokens += len(entry.ids)
      self._out.write(entry.ids.astype(self._dtype).tobytes())
      if entry.codes is not None:
        self._write_codes(entry.codes)
      self._progress.count(entry.file, entry.num_bytes or entry.ids.nbytes)
    self._refused += refused
    self.refused += refused
    self._added += 1
    self._progress.say(self._num_tokens + self._tokens)
    if self._tokens >= SHARD_TOKENS:
      self._close(last=False)
      self._open()

  def _write_codes(self, values: np.ndarray) -> None:
    if self._codes is None:
      self._codes = open(codes_path(self._folder, len(self._done)), "wb")  # noqa: SIM115
    self._codes.write(values.tobytes())

  def refer(self, number: int, line: int, part: int, start: int, length: int) -> None:
    """Append a document that stays in its token file."""
    self._append(number, line, part, start, length)

  def use(self, ids: np.ndarray) -> None:
    """Note that these ids are in the text."""
    for begin in range(0, len(ids), _USED_IDS):
      self._used[ids[begin : begin + _USED_IDS]] = True

  def _append(self, number: int, line: int, part: int, start: int, length: int) -> None:
    key = name_hash(document_name(self._files[number], line, part))
    for name, value in zip(COLUMNS, (number, line, part, start, length, 0, key), strict=True):
      self._columns[name].append(value)

  def _close(self, *, last: bool) -> None:
    """Make the shard durable, then say that it is there."""
    number = len(self._done)
    written = [ids_path(self._folder, number)]
    if self._codes is not None:
      written.append(codes_path(self._folder, number))
    for file in filter(None, (self._out, self._codes)):
      file.flush()
      os.fsync(file.fileno())
    self.close()
    columns = self._path(number, "columns")
    with open(columns, "wb") as file:
      np.savez(
        file,
        allow_pickle=False,
        used=self._used,
        **{f"column_{n}": np.array(v) for n, v in self._columns.items()},
      )
      file.flush()
      os.fsync(file.fileno())
    hashes = {}
    for path in (*written, columns):
      with open(path, "rb") as file:
        hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    part = {
      "batches": self._added, "tokens": self._tokens, "continued": self._continued,
      "last": last, "refused": self._refused, "sha256": hashes,
    }  # fmt: skip
    cache.write_atomically(self._path(number, "part"), json.dumps(part))
    self._done.append(part)
    self._num_tokens += self._tokens

  def close(self) -> None:
    """Close the file; what is not finished is left as it is."""
    for file in filter(None, (self._out, self._codes)):
      file.close()

  def finish(self) -> dict[str, Any]:
    """Join the columns, and take away what served to go on."""
    if not self.complete:
      self._close(last=True)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    for number, done in enumerate(self._done):
      with np.load(self._path(number, "columns")) as columns:
        self._used |= columns["used"]
        for name in ("length", "num_bytes"):
          if more := done["continued"][name == "num_bytes"]:
            next(part for part in reversed(parts[name]) if len(part))[-1] += more
        for name in COLUMNS:
          parts[name].append(columns[f"column_{name}"])
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    for name, values in joined.items():
      np.save(self._folder / f"{name}.npy", values)
    for number in reversed(range(len(self._done))):  # so that what is left is a beginning
      self._path(number, "part").unlink()
      self._path(number, "columns").unlink()
    return {
      "shards": len(self._done),
      "num_tokens": int(joined["length"].sum()),
      "num_bytes": int(joined["num_bytes"].sum()),
      "ids_used": int(self._used.sum()),
    }


class _Progress:
  """Says now and then how far it is, by the bytes of the input."""

  def __init__(self, files: list[SourceFile], options: TokeniseOptions):
    self._files, self._options = files, options
    self._size, self._before = [0] * len(files), [0] * len(files)  # bytes, and of what comes first
    self._total = 0
    for number in sorted(range(len(files)), key=lambda n: files[n].kind == "tokens"):
      with contextlib.suppress(OSError):  # said when its documents are read
        self._size[number] = os.path.getsize(files[number].path)
      self._before[number] = self._total
      self._total += self._size[number]
    self._file = self._in_file = self._text = 0
    self._began = self._said = time.monotonic()

  def count(self, number: int, num_bytes: int) -> None:
    """Take in a piece of a file."""
    if number != self._file:
      self._file, self._in_file = number, 0
    self._in_file += num_bytes
    self._text += num_bytes

  def say(self, num_tokens: int) -> None:
    """Show it, if it is time."""
    now = time.monotonic()
    if now - self._said < self._options.every_secs:
      return
    self._said = now
    done = self._before[self._file] + min(self._in_file, self._size[self._file])
    rate = self._text / (now - self._began) / 1e6
    self._options.say(
      f"Tokenising: {done / max(self._total, 1):.0%} of {self._total / 1e6:,.1f} MB, "
      f"{num_tokens:,} tokens, {rate:.1f} MB/s, now in {self._files[self._file].path}"
    )
