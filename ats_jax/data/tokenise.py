"""Documents -> shards of token ids, in order, by any number of processes.

What was finished before a process was killed is kept: the input is read again, and what the shards
hold already is not encoded again. The result is the same bytes.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data import cache
from ats_jax.data.child import end_with_parent
from ats_jax.data.formats.text import Piece
from ats_jax.data.formats.token_files import token_array, token_documents, token_dtype
from ats_jax.data.holdout import Split
from ats_jax.data.report import Report
from ats_jax.data.source import SourceFile, document_name, name_hash, pieces
from ats_jax.data.tokenizer import Tokenizer

REPORT = "report.txt"
SHARD_TOKENS = 2**26  # of a shard at least, but for the last one
_BATCH_CHARS = 2**23  # text encoded at a time
_BATCH_IDS = 2**22
# One entry per document; 48 bytes of memory each while a corpus is read.
COLUMNS = {"file": "i", "line": "q", "part": "i", "start": "q", "length": "q", "num_bytes": "q",
            "key": "Q"}  # fmt: skip

Batch = list[tuple[int, Piece]]  # (number of the file, a piece of it)
Encoded = tuple[Batch, Sequence[np.ndarray]]


class How(NamedTuple):
  """How to go about it; the result does not depend on it, but for `copies_ids`.

  Attributes:
    workers: processes that encode; 0 = this one.
    copies_ids: ids of token files are put into the shards, so that nothing else is needed.
    say: shows how far it is.
    every_secs: how often.
  """

  workers: int = 0
  copies_ids: bool = False
  say: Callable[[str], None] = logging.info
  every_secs: float = 15.0


USUAL = How()


def shard(folder: Path, number: int) -> Path:
  """Where the ids of a shard are."""
  return folder / f"tokens-{number:05}.bin"


def tokenise(
  folder: Path,
  files: list[SourceFile],
  cfg: DataConfig,
  tokenizer: Tokenizer,
  split: Split,
  how: How,
) -> dict[str, Any]:
  """Write the documents of `files` to `folder`, or what is missing there.

  Returns:
    Facts for `cache.Folder.meta`.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, a token file holds a foreign id, or a
      process died.
  """
  began = time.monotonic()
  with open(folder / REPORT, "w", errors="backslashreplace") as report_file:
    report = Report(strict=cfg.strict, file=report_file)
    with contextlib.closing(_Shards(folder, files, tokenizer.vocab_size, how)) as shards:
      texts = _batches(files, cfg.text_field, report, split)
      left = shards.batches - sum(1 for _ in itertools.islice(texts, shards.batches))
      with contextlib.closing(_encoded(texts, tokenizer, how.workers)) as encoded:
        for batch in encoded:
          shards.add(*batch)
      documents = _token_documents(files, tokenizer, report, split)
      if how.copies_ids:
        ids = _ids(files, documents, tokenizer.vocab_size)
        for batch in itertools.islice(ids, left, None):
          shards.add(*batch)
      else:
        for document in documents:
          if not shards.complete:
            shards.refer(*document)
        for file in files:
          if file.kind == "tokens":
            shards.use(token_array(file.path, tokenizer.vocab_size))
      shards.use(np.array([tokenizer.bos_id, tokenizer.eos_id]))
      facts = shards.finish()
  balance = report.balance()
  logging.info(
    "Read %s documents, %s tokens, %.1f MB of text from %s files in %.1f s.",
    f"{balance['documents']:,}", f"{facts.pop('num_tokens'):,}", facts.pop("num_bytes") / 1e6,
    f"{len(files):,}", time.monotonic() - began,
  )  # fmt: skip
  return {
    **facts, "vocab_size": tokenizer.vocab_size, "report": report.summary(), "balance": balance,
    "copied": how.copies_ids, "files": [[file.name, file.kind] for file in files],
  }  # fmt: skip


def _batches(
  files: list[SourceFile], text_field: str, report: Report, split: Split
) -> Iterator[Batch]:
  """Lists of pieces of about `_BATCH_CHARS` characters; the same ones each time."""
  batch: Batch = []
  num_chars = 0
  for number, file in enumerate(files):
    if file.kind == "tokens":
      continue
    for piece in split.cut(file, pieces(file, text_field, report)):
      batch.append((number, piece))
      num_chars += len(piece.text)
      if num_chars >= _BATCH_CHARS:
        yield batch
        batch, num_chars = [], 0
  if batch:
    yield batch


class _Document(NamedTuple):
  """Of a token file."""

  number: int
  line: int
  part: int
  start: int
  length: int


def _token_documents(
  files: list[SourceFile], tokenizer: Tokenizer, report: Report, split: Split
) -> Iterator[_Document]:
  for number, file in enumerate(files):
    if file.kind != "tokens":
      continue
    found = token_documents(
      file.path, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id,
      eos_id=tokenizer.eos_id, report=report,
    )  # fmt: skip
    for line, start, length in zip(*(column.tolist() for column in found), strict=True):
      for part, begin, end in split.cut_ids(document_name(file, line), length):
        yield _Document(number, line, part, start + begin, end - begin)


def _ids(
  files: list[SourceFile], documents: Iterable[_Document], vocab_size: int
) -> Iterator[Encoded]:
  """Their ids, in batches of one piece each."""
  for number, group in itertools.groupby(documents, lambda document: document.number):
    array = token_array(files[number].path, vocab_size)
    for document in group:
      for begin in range(0, document.length, _BATCH_IDS):
        ids = array[document.start :][begin : min(begin + _BATCH_IDS, document.length)]
        piece = Piece(document.line, begin == 0, "", document.part)
        yield [(number, piece)], [ids]


def _encoded(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int) -> Generator[Encoded]:
  """Batches with their ids, in order; at most two for each process are in memory."""
  if not workers:
    for batch in batches:
      yield batch, tokenizer.encode_batch([piece.text for _, piece in batch])
    return
  context = multiprocessing.get_context("spawn")
  pool = futures.ProcessPoolExecutor(workers, context, initializer=_start, initargs=(tokenizer,))
  waiting: collections.deque[tuple[Batch, futures.Future]] = collections.deque()
  try:
    for batch in batches:
      waiting.append((batch, pool.submit(_encode, [piece.text for _, piece in batch])))
      if len(waiting) > 2 * workers:
        yield _result(*waiting.popleft())
    while waiting:
      yield _result(*waiting.popleft())
  except futures.process.BrokenProcessPool as e:
    raise ValueError(
      f"One of the {workers} processes that tokenise was ended, by lack of memory perhaps. What is "
      "done is kept: run the same command again, with fewer --workers."
    ) from e
  finally:
    pool.shutdown(cancel_futures=True)


def _result(batch: Batch, future: futures.Future) -> Encoded:
  ids, ends = future.result()
  return batch, np.split(ids, ends)


_tokenizer: Tokenizer | None = None  # of a process that encodes


def _start(tokenizer: Tokenizer) -> None:
  global _tokenizer
  _tokenizer = tokenizer
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
  end_with_parent()


def _encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
  """The ids of all texts, and where those of each but the last end."""
  assert _tokenizer is not None
  ids = _tokenizer.encode_batch(texts)
  joined = np.concatenate(ids).astype(token_dtype(_tokenizer.vocab_size))
  return joined, np.cumsum([len(part) for part in ids])[:-1]


class _Shards:
  """Writes shards, each with a part of the columns, which `finish` joins.

  Attributes:
    batches: that the shards hold which were there before.
    complete: whether those are all.
  """

  def __init__(self, folder: Path, files: list[SourceFile], vocab_size: int, how: How):
    self._folder, self._files, self._how = folder, files, how
    self._dtype = token_dtype(vocab_size)
    self._done = self._intact()
    self.batches = sum(part["batches"] for part in self._done)
    self.complete = bool(self._done) and self._done[-1]["last"]
    self._num_tokens = sum(part["tokens"] for part in self._done)
    self._used = np.zeros(vocab_size, bool)
    self._out = None
    self._progress = _Progress(files, how)
    for rest in folder.glob("*.tmp"):
      rest.unlink()
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
        for path in (shard(self._folder, number), self._path(number, "columns")):
          with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part["sha256"][path.name]:
              return done
        done.append(part)
    return done

  def _open(self) -> None:
    self._columns = {name: array(code) for name, code in COLUMNS.items()}
    self._added = self._tokens = 0  # batches and ids of this shard
    self._continued = [0, 0]  # ids and bytes of a document that began in the last shard
    self._out = open(shard(self._folder, len(self._done)), "wb")  # noqa: SIM115

  def add(self, batch: Batch, encoded: Sequence[np.ndarray]) -> None:
    """Append a batch; a shard that is full is closed."""
    assert self._out is not None
    columns = self._columns
    for (number, piece), ids in zip(batch, encoded, strict=True):
      if piece.starts:
        self._append(number, piece.line, piece.part, self._num_tokens + self._tokens, 0)
      num_bytes = len(piece.text.encode())
      if columns["length"]:
        columns["length"][-1] += len(ids)
        columns["num_bytes"][-1] += num_bytes
      else:
        self._continued = [self._continued[0] + len(ids), self._continued[1] + num_bytes]
      self._tokens += len(ids)
      self._out.write(ids.astype(self._dtype).tobytes())
      self._progress.count(number, num_bytes or ids.nbytes)
    self._used[np.concatenate(encoded)] = True
    self._added += 1
    self._progress.say(self._num_tokens + self._tokens)
    if self._tokens >= SHARD_TOKENS:
      self._close(last=False)
      self._open()

  def refer(self, number: int, line: int, part: int, start: int, length: int) -> None:
    """Append a document that stays in its token file."""
    self._append(number, line, part, start, length)

  def use(self, ids: np.ndarray) -> None:
    """Note that these ids are in the text."""
    for begin in range(0, len(ids), _BATCH_IDS):
      self._used[ids[begin : begin + _BATCH_IDS]] = True

  def _append(self, number: int, line: int, part: int, start: int, length: int) -> None:
    key = name_hash(document_name(self._files[number], line, part))
    for name, value in zip(COLUMNS, (number, line, part, start, length, 0, key), strict=True):
      self._columns[name].append(value)

  def _close(self, *, last: bool) -> None:
    """Make the shard durable, then say that it is there."""
    assert self._out is not None
    self._out.flush()
    os.fsync(self._out.fileno())
    self.close()
    number = len(self._done)
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
    for path in (shard(self._folder, number), columns):
      with open(path, "rb") as file:
        hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    part = {
      "batches": self._added, "tokens": self._tokens, "continued": self._continued,
      "last": last, "sha256": hashes,
    }  # fmt: skip
    cache.write_atomically(self._path(number, "part"), json.dumps(part))
    self._done.append(part)
    self._num_tokens += self._tokens

  def close(self) -> None:
    """Close the file; what is not finished is left as it is."""
    if self._out is not None:
      self._out.close()

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

  def __init__(self, files: list[SourceFile], how: How):
    self._files, self._how = files, how
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
    if now - self._said < self._how.every_secs:
      return
    self._said = now
    done = self._before[self._file] + min(self._in_file, self._size[self._file])
    rate = self._text / (now - self._began) / 1e6
    self._how.say(
      f"Tokenising: {done / max(self._total, 1):.0%} of {self._total / 1e6:,.1f} MB, "
      f"{num_tokens:,} tokens, {rate:.1f} MB/s, now in {self._files[self._file].path}"
    )
