"""Source files -> one tokenised, cached corpus of documents that can be read at random."""

import hashlib
import itertools
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data import cache
from ats_jax.data.chat.records import message_pieces
from ats_jax.data.source import (
  Piece,
  Report,
  SourceFile,
  pieces,
  token_array,
  token_documents,
  token_dtype,
)
from ats_jax.data.tokenizer import Tokenizer

BATCH_CHARS = 2**23  # text in memory at a time
_OPEN_FILES = 64  # files the BPE's sample is drawn from at a time
_SAY_SECS = 15
REPORT = "report.txt"
CODES = "codes.bin"
# One entry per document; 44 bytes of memory each while a corpus is read.
COLUMNS = {"file": "i", "line": "q", "start": "q", "length": "q", "num_bytes": "q", "key": "Q"}


class Corpus:
  """Tokenised documents: those of text in the cache, those of token files where they are.

  Attributes:
    length: [documents] int64, text tokens of each.
    num_bytes: [documents] int64, UTF-8 bytes of each; 0 for those of token files.
    key: [documents] uint64, hash of each name.
    report: counts of what was malformed or skipped, the first few in words, the file with all.
  """

  def __init__(self, folder: cache.Folder, files: list[SourceFile]):
    self._folder, self._files = folder, files
    self.report = {**folder.meta["report"], "file": str(folder.path / REPORT)}
    self.length = folder.array("length")
    self.num_bytes = folder.array("num_bytes")
    self.key = folder.array("key")
    self._start, self._line = folder.array("start"), folder.array("line")
    self._file = folder.array("file")
    vocab_size = folder.meta["vocab_size"]
    text = token_array(str(folder.path / "tokens.bin"), vocab_size)
    self._ids = [token_array(f.path, vocab_size) if f.kind == "tokens" else text for f in files]
    self._codes = _mapped_codes(folder.path / CODES)

  def __len__(self) -> int:
    return len(self.length)

  def tokens(self, document: int, begin: int, end: int) -> np.ndarray:
    """Text tokens [begin, end) of a document; an `end` past the last token is cut."""
    start = int(self._start[document])
    end = min(end, int(self.length[document]))
    return self._ids[self._file[document]][start + begin : start + end]

  def codes(self, document: int, begin: int, end: int) -> np.ndarray:
    """The codes (`chat.segments`) of the same tokens of a conversation, as uint8."""
    assert self._codes is not None
    start = int(self._start[document])
    return self._codes[start + begin : start + min(end, int(self.length[document]))]

  def name(self, document: int) -> str:
    """See `document_name`."""
    file = self._files[self._file[document]]
    return document_name(file, int(self._line[document]))

  def __reduce__(self):
    return Corpus, (self._folder, self._files)


def _mapped_codes(path: Path) -> np.ndarray | None:
  """The codes of a corpus of conversations; None = it is of text."""
  if not path.exists():
    return None
  return (
    np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.empty(0, "B")
  )


def document_name(file: SourceFile, line: int) -> str:
  """What a document is called in the split, in reports and in the audit."""
  place = {"text": "", "jsonl": f":{line}", "tokens": f"#{line}"}
  return file.name + place.get(file.kind, f":{line}")  # an extension's: the place in its file


def name_hash(name: str) -> int:
  """64 bits of BLAKE2b."""
  raw = name.encode(errors="surrogateescape")  # a file's name may be any bytes
  return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest())


def held_out(key: np.ndarray | int, fraction: float) -> np.ndarray:
  """Whether documents with these name hashes are for validation."""
  return np.asarray(key, np.uint64) < np.uint64(fraction * 2**64)


def train_texts(files: list[SourceFile], cfg: DataConfig, fraction: float) -> Iterator[str]:
  """Training text, drawn from the files in turn, in the order of a hash of their names.

  Raises:
    ValueError: if there is none.
  """
  report = Report(strict=cfg.strict)
  text_files = sorted((f for f in files if f.kind != "tokens"), key=lambda f: name_hash(f.name))
  if not text_files:
    raise ValueError(
      "All input files hold token ids, so there is no text to train a BPE on. "
      "Set data.tokenizer to the tokenizer.json they were made with, or to 'bytes'."
    )
  kept, left_out = 0, 0
  of_text = lambda file, report: pieces(file, cfg.text_field, report)
  read = message_pieces if cfg.chat_template else of_text

  def texts(file: SourceFile) -> Iterator[str]:
    nonlocal kept, left_out
    for piece in read(file, report):
      if held_out(name_hash(document_name(file, piece.line)), fraction):
        left_out += piece.starts
      else:
        kept += piece.starts
        yield piece.text

  for group in itertools.batched(text_files, _OPEN_FILES):
    open_files = [texts(file) for file in group]
    while open_files:
      for text in list(open_files):
        try:
          yield next(text)
        except StopIteration:
          open_files.remove(text)
  if not kept:
    raise ValueError(nothing_left(left_out, str(report)))


def nothing_left(num_held_out: int, report: str) -> str:
  """The message for a training split without a document."""
  return (
    f"Nothing is left to train on: {num_held_out} documents are held out for validation; {report}. "
    "Check data.paths and data.text_field; a corpus of one document needs "
    "data.validation_paths or data.validation_fraction=0."
  )


def open_corpus(
  cfg: DataConfig, files: list[SourceFile], fingerprint: str, tokenizer: Tokenizer
) -> Corpus:
  """The tokenised corpus of `files`, from the cache or made now.

  Args:
    cfg: `text_field`, `strict` and `cache_dir` are read.
    files: from `find_files`.
    fingerprint: of their names and contents.
    tokenizer: makes the ids.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, or a token file holds a foreign id.
  """

  def build(folder: Path) -> dict[str, Any]:
    return _tokenise(folder, files, cfg, tokenizer)

  key = cache.digest("corpus", fingerprint, tokenizer.fingerprint, cfg.text_field)
  folder = cache.cached(cache.cache_root(cfg.cache_dir), f"corpus-{key}", build)
  say_malformed(cfg, folder)
  return Corpus(folder, files)


def say_malformed(cfg: DataConfig, folder: cache.Folder) -> None:
  """Warn of what a corpus leaves out, which may have been found by an earlier process.

  Raises:
    ValueError: if there is any and `cfg.strict`.
  """
  report = folder.meta["report"]
  if report["malformed"]:
    if cfg.strict:  # the cache was made without it
      raise ValueError(
        f"{report['first'][0]}. Mend it, or set data.strict=False to count it and leave it out."
      )
    counts = ", ".join(f"{n} {kind}" for kind, n in report["malformed"].items())
    logging.warning(
      "Malformed input was left out: %s. All are named in %s; the first:\n  %s",
      counts, folder.path / REPORT, "\n  ".join(report["first"]),
    )  # fmt: skip


def _tokenise(
  folder: Path, files: list[SourceFile], cfg: DataConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
  began = said = time.monotonic()
  dtype = token_dtype(tokenizer.vocab_size)
  columns = {name: array(code) for name, code in COLUMNS.items()}
  num_tokens = 0

  def add(number: int, line: int, start: int, length: int) -> None:
    key = name_hash(document_name(files[number], line))
    for name, value in zip(COLUMNS, (number, line, start, length, 0, key), strict=True):
      columns[name].append(value)

  with open(folder / REPORT, "w") as report_file, open(folder / "tokens.bin", "wb") as out:
    report = Report(strict=cfg.strict, file=report_file)
    for batch in _batches(files, cfg.text_field, report):
      texts = [piece.text for _, piece in batch]
      for (number, piece), ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
        if piece.starts:
          add(number, piece.line, num_tokens, 0)
        columns["length"][-1] += len(ids)
        columns["num_bytes"][-1] += len(piece.text.encode())
        num_tokens += len(ids)
        out.write(ids.astype(dtype).tobytes())
      if time.monotonic() - said > _SAY_SECS:
        said = time.monotonic()
        logging.info(
          "Tokenising: %s tokens, now in %s.", f"{num_tokens:,}", files[batch[-1][0]].path
        )
    for number, file in enumerate(files):
      if file.kind == "tokens":
        lines, starts, lengths = token_documents(
          file.path, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id,
          eos_id=tokenizer.eos_id, report=report,
        )  # fmt: skip
        for document in zip(lines.tolist(), starts.tolist(), lengths.tolist(), strict=True):
          add(number, *document)
  for name, values in columns.items():
    np.save(folder / f"{name}.npy", np.array(values))
  logging.info(
    "Read %s documents, %s tokens, %.1f MB of text from %s files in %.1f s.",
    f"{len(columns['length']):,}", f"{sum(columns['length']):,}", sum(columns["num_bytes"]) / 1e6,
    f"{len(files):,}", time.monotonic() - began,
  )  # fmt: skip
  return {"vocab_size": tokenizer.vocab_size, "report": report.summary()}


def _batches(
  files: list[SourceFile], text_field: str, report: Report
) -> Iterator[list[tuple[int, Piece]]]:
  """Lists of (file number, piece) of about `BATCH_CHARS` characters."""
  batch: list[tuple[int, Piece]] = []
  num_chars = 0
  for number, file in enumerate(files):
    if file.kind == "tokens":
      continue
    for piece in pieces(file, text_field, report):
      batch.append((number, piece))
      num_chars += len(piece.text)
      if num_chars >= BATCH_CHARS:
        yield batch
        batch, num_chars = [], 0
  if batch:
    yield batch
