"""Documents -> shards of token ids, in order, by any number of processes.

What was finished before a process was killed is kept: the input is read again, and what the shards
hold already is not encoded again. The result is the same bytes.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus.child import map_in_children
from ats_jax.data.corpus.shards import EncodedPiece, Shards, TokeniseOptions
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.formats.token_files import token_array, token_documents, token_dtype
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, document_name, read_pieces
from ats_jax.data.tokens.base import Tokenizer

REPORT = "report.txt"
_BATCH_CHARS = 2**23  # text encoded at a time
_BATCH_IDS = 2**22
Batch = list[tuple[int, Piece]]  # (number of the file, a piece of it)


def write_corpus(
  folder: Path,
  files: list[SourceFile],
  cfg: DataConfig,
  tokenizer: Tokenizer,
  options: TokeniseOptions,
  fill: Callable[["Shards", Report], None],
) -> dict[str, Any]:
  """Write the documents of `files` to `folder`, or what is missing there.

  Args:
    folder: for the corpus.
    files: from `find_files`.
    cfg: `strict` is read.
    tokenizer: the tokenizer of the ids.
    options: processes and progress of tokenising.
    fill: gives the shards what they do not hold yet, and the report all that is malformed.

  Returns:
    Facts for `cache.Folder.meta`.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, or as `fill`.
  """
  began = time.monotonic()
  with open(folder / REPORT, "w", encoding="utf-8", errors="backslashreplace") as report_file:
    report = Report(strict=cfg.strict, file=report_file)
    with contextlib.closing(Shards(folder, files, tokenizer.vocab_size, options)) as shards:
      fill(shards, report)
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
    "copied": options.copies_ids, "files": [[file.name, file.kind] for file in files],
  }  # fmt: skip


def tokenise(
  folder: Path,
  files: list[SourceFile],
  cfg: DataConfig,
  tokenizer: Tokenizer,
  split: Split,
  options: TokeniseOptions,
) -> dict[str, Any]:
  """Write the documents of text and of token ids to `folder`, or what is missing there.

  Returns:
    Facts for `cache.Folder.meta`.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, a token file holds a foreign id, or a
      process died.
  """

  def fill(shards: Shards, report: Report) -> None:
    texts = piece_batches(_pieces(files, cfg.format.text_field, report, split))
    left = shards.skip_held(texts)
    add_texts(shards, texts, tokenizer, options.workers)
    documents = _token_documents(files, tokenizer, report, split)
    if options.copies_ids:
      for entry in itertools.islice(_ids(files, documents, tokenizer.vocab_size), left, None):
        shards.add([entry], entry.ids)
      return
    for document in documents:
      if not shards.complete:
        shards.refer(*document)
    for file in files:
      if file.kind == "tokens":
        shards.use(token_array(file.path, tokenizer.vocab_size))

  return write_corpus(folder, files, cfg, tokenizer, options, fill)


def add_texts(
  shards: Shards, batches: Iterator[Batch], tokenizer: Tokenizer, workers: int = 0
) -> None:
  """Encode batches of text, and append them.

  Args:
    shards: take them.
    batches: from `piece_batches`.
    tokenizer: the tokenizer of the ids.
    workers: processes that encode; 0 = this one.

  Raises:
    ValueError: if a process died.
  """
  sent = lambda batch: [piece.text for _, piece in batch]
  with contextlib.closing(
    map_in_children(batches, tokenizer, workers, sent, _encode, "tokenise")
  ) as encoded:
    for batch, ids in encoded:
      shards.add(_entries(batch, ids), ids[0])


def _pieces(
  files: list[SourceFile], text_field: str, report: Report, split: Split
) -> Iterator[tuple[int, Piece]]:
  for number, file in enumerate(files):
    if file.kind != "tokens":
      for piece in split.cut(file, read_pieces(file, text_field, report)):
        yield number, piece


def piece_batches(numbered: Iterable[tuple[int, Piece]]) -> Iterator[Batch]:
  """Group pieces into lists of about `_BATCH_CHARS` characters, the same ones each time."""
  batch: Batch = []
  num_chars = 0
  for number, piece in numbered:
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
    columns = token_documents(
      file.path, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id,
      eos_id=tokenizer.eos_id, report=report,
    )  # fmt: skip
    for line, start, length in zip(*(column.tolist() for column in columns), strict=True):
      for part, begin, end in split.cut_ids(document_name(file, line), length):
        yield _Document(number, line, part, start + begin, end - begin)


def _ids(
  files: list[SourceFile], documents: Iterable[_Document], vocab_size: int
) -> Iterator[EncodedPiece]:
  """Their ids, in parts of bounded length."""
  for number, group in itertools.groupby(documents, lambda document: document.number):
    array = token_array(files[number].path, vocab_size)
    for document in group:
      for begin in range(0, document.length, _BATCH_IDS):
        ids = array[document.start :][begin : min(begin + _BATCH_IDS, document.length)]
        yield EncodedPiece(number, document.line, begin == 0, ids, 0, document.part)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
  """The ids of all texts, and where those of each but the last end."""
  ids = tokenizer.encode_batch(texts)
  joined = np.concatenate(ids).astype(token_dtype(tokenizer.vocab_size))
  return joined, np.cumsum([len(part) for part in ids])[:-1]


def _entries(batch: Batch, ids: tuple[np.ndarray, np.ndarray]) -> Iterator[EncodedPiece]:
  joined, ends = ids
  begins = [0, *ends.tolist(), len(joined)]
  for (number, piece), (begin, end) in zip(batch, itertools.pairwise(begins), strict=True):
    num_bytes = len(piece.text.encode())
    yield EncodedPiece(number, piece.line, piece.starts, joined[begin:end], num_bytes, piece.part)
