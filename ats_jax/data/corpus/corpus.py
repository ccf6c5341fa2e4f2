"""Source files -> one tokenised, cached corpus of documents that can be read at random."""

import bisect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.shards import DEFAULT_OPTIONS, TokeniseOptions, codes_path, ids_path
from ats_jax.data.corpus.tokenise import REPORT, tokenise
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.formats.token_files import token_array
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, document_name, name_hash
from ats_jax.data.tokens.tokenizer import Tokenizer

LAYOUT = 4  # of a corpus in the cache: raise it when its files change
NO_RECORD = "the files hold no record, or no more than is held out"
_OPEN_FILES = 64  # files the BPE's sample is drawn from at a time


class Corpus:
  """Tokenised documents: those of text in the cache, those of token files where they are.

  Attributes:
    length: [documents] int64, text tokens of each.
    num_bytes: [documents] int64, UTF-8 bytes of each; 0 for those of token files.
    key: [documents] uint64, hash of each name.
    file: [documents] int32, the number of the file that each is in; see `file_names`.
    part: [documents] int32, of the document in its file that each is; see `Split.cut`.
    ids_used: how many ids of the tokenizer are in the text.
    report: counts of what was malformed or skipped, the first few in words, the file with all;
      `balance`, the counts of records.
  """

  def __init__(self, folder: cache.Folder, files: list[SourceFile]):
    self.folder, self._files = folder, files
    meta = folder.meta
    self.report = {**meta["report"], "balance": meta["balance"], "file": str(folder.path / REPORT)}
    self.length = folder.array("length")
    self.num_bytes = folder.array("num_bytes")
    self.key, self.part = folder.array("key"), folder.array("part")
    self._start, self._line = folder.array("start"), folder.array("line")
    self.file = folder.array("file")
    vocab_size = meta["vocab_size"]
    self.ids_used: int = meta["ids_used"]
    numbers = range(meta["shards"])
    text = _joined([token_array(str(ids_path(folder.path, n)), vocab_size) for n in numbers])
    self._codes = _joined([_mapped_codes(codes_path(folder.path, n)) for n in numbers])
    apart = {n for n, file in enumerate(files) if file.kind == "tokens" and not meta["copied"]}
    self._ids = [
      token_array(file.path, vocab_size) if n in apart else text for n, file in enumerate(files)
    ]

  def __len__(self) -> int:
    return len(self.length)

  def tokens(self, document: int, begin: int, end: int) -> np.ndarray:
    """Text tokens [begin, end) of a document; an `end` past the last token is cut."""
    start = int(self._start[document])
    end = min(end, int(self.length[document]))
    return self._ids[self.file[document]][start + begin : start + end]

  def codes(self, document: int, begin: int, end: int) -> np.ndarray:
    """The codes (`chat.segments`) of the same tokens of a conversation, as uint8."""
    start = int(self._start[document])
    return self._codes[start + begin : start + min(end, int(self.length[document]))]

  def name(self, document: int) -> str:
    """Return the name of a document, as `document_name` makes it."""
    file = self._files[self.file[document]]
    return document_name(file, int(self._line[document]), int(self.part[document]))

  def file_names(self) -> list[str]:
    """Of all files, in order."""
    return [file.name for file in self._files]

  def __reduce__(self):
    return Corpus, (self.folder, self._files)


def _mapped_codes(path: Path) -> np.ndarray:
  """The codes of a shard of conversations; none of one of text."""
  has_some = path.exists() and path.stat().st_size
  return np.memmap(path, np.uint8, "r").view(np.ndarray) if has_some else np.empty(0, np.uint8)


def _joined(arrays: list[np.ndarray]) -> "np.ndarray | _Joined":
  return arrays[0] if len(arrays) == 1 else _Joined(arrays)


class _Joined:
  """Arrays one behind the other, sliced as one."""

  def __init__(self, arrays: list[np.ndarray]):
    self._arrays = arrays
    self._starts = [0, *itertools.accumulate(map(len, arrays))]

  def __getitem__(self, where: slice) -> np.ndarray:
    begin, end = where.start, min(where.stop, self._starts[-1])
    number = bisect.bisect_right(self._starts, begin) - 1
    parts = []
    while begin < end:
      start, stop = self._starts[number], self._starts[number + 1]
      parts.append(self._arrays[number][begin - start : end - start])
      begin, number = stop, number + 1
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._arrays[0][:0]])


def train_texts(
  files: list[SourceFile],
  read: Callable[[SourceFile, Report], Iterator[Piece]],
  split: Split,
  *,
  strict: bool,
) -> Iterator[str]:
  """Training text, drawn from the files in turn, in the order of a hash of their names.

  Args:
    files: from `find_files`.
    read: reads the documents of one.
    split: the split, which may cut documents.
    strict: `data.strict`.

  Raises:
    ValueError: if there is none, or if `strict` and something is malformed.
  """
  report = Report(strict=strict)
  text_files = sorted((f for f in files if f.kind != "tokens"), key=lambda f: name_hash(f.name))
  if not text_files:
    raise ValueError(
      "All input files hold token ids, so there is no text to train a BPE on. "
      "Set data.tokenizer to the tokenizer.json they were made with, or to 'bytes'."
    )
  has_text = False

  def texts(file: SourceFile) -> Iterator[str]:
    nonlocal has_text
    for piece in split.cut(file, read(file, report)):
      key = 0 if split.block else name_hash(document_name(file, piece.line))
      if not split.held_out(key, piece.part):
        has_text = True
        yield piece.text

  for group in itertools.batched(text_files, _OPEN_FILES):
    open_files = [texts(file) for file in group]
    while open_files:
      for text in list(open_files):
        try:
          yield next(text)
        except StopIteration:
          open_files.remove(text)
  if not has_text:
    left_out = report.dropped or report.filtered
    raise ValueError(nothing_left(str(report) if left_out else NO_RECORD))


def nothing_left(report: str) -> str:
  """The message for a training split without a document."""
  return f"Nothing is left to train on: {report}. Check data.paths and data.format."


def open_corpus(
  cfg: DataConfig,
  files: list[SourceFile],
  fingerprint: str,
  tokenizer: Tokenizer,
  split: Split,
  options: TokeniseOptions = DEFAULT_OPTIONS,
) -> Corpus:
  """The tokenised corpus of `files`, from the cache or made now.

  Args:
    cfg: `format.text_field`, `strict` and `cache_dir` are read.
    files: from `find_files`.
    fingerprint: a hash of their names and contents.
    tokenizer: makes the ids.
    split: the split, which may cut documents.
    options: processes and progress of tokenising.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, or a token file holds a foreign id.
  """

  def build(folder: Path) -> dict[str, Any]:
    return tokenise(folder, files, cfg, tokenizer, split, options)

  parts = [
    split.content(fingerprint),
    tokenizer.fingerprint,
    cfg.format.text_field,
    options.copies_ids,
  ]
  name = f"corpus-{cache.digest('corpus', LAYOUT, *parts)}"
  folder = cache.cached(cache.cache_root(cfg.cache_dir), name, build, goes_on=True)
  warn_of_malformed(folder, cfg.strict)
  return Corpus(folder, files)


def warn_of_malformed(folder: cache.Folder, strict: bool) -> None:
  """Say what was left out of a corpus.

  Raises:
    ValueError: if `strict` and something was: the cache was made without it.
  """
  report = folder.meta["report"]
  if not report["malformed"]:
    return
  if strict:
    raise ValueError(
      f"{report['first'][0]}. Mend it, or set data.strict=False to count it and leave it out."
    )
  counts = ", ".join(f"{n} {kind}" for kind, n in report["malformed"].items())
  logging.warning(
    "Malformed input was left out: %s. All are named in %s; the first:\n  %s",
    counts, folder.path / REPORT, "\n  ".join(report["first"]),
  )  # fmt: skip
