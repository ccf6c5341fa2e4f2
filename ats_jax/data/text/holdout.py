"""What is held out for validation: whole documents, or where those are few, blocks inside them."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.formats.token_files import token_documents
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, document_name, name_hash, read_pieces
from ats_jax.data.tokens.tokenizer import Tokenizer

# Lengths of a block that is held out, in characters, or in ids of a token file.
_LEAST_BLOCK = 256
_MOST_BLOCK = 2**16
_LEAST_BLOCKS = 8  # of a text; a smaller one is trained on whole
_WANTED = 4  # held-out blocks, where text is short
_MOST_DOCUMENTS = 100_000  # so many are not few, whatever the fraction is


@dataclasses.dataclass(frozen=True)
class Split:
  """What is held out.

  Attributes:
    fraction: share of the text; 0 = nothing.
    block: their size in characters or ids; 0 = documents are held out whole, by name.
    blocks: held-out [begin, end) of a document, in order and apart, by the document's name.
    why: what the log says of it; "" if that needs no word.
  """

  fraction: float
  block: int = 0
  blocks: Mapping[str, Sequence[Sequence[int]]] = dataclasses.field(default_factory=dict)
  why: str = ""

  def content(self, fingerprint: str) -> str:
    """A hash of the documents, from that of the files."""
    return cache.digest(fingerprint, self.block, self.blocks) if self.block else fingerprint

  def held_out(self, key: np.ndarray | int, part: np.ndarray | int) -> np.ndarray:
    """Whether documents with these name hashes and parts are for validation."""
    if self.block:
      return np.asarray(part) % 2 == 1
    return np.asarray(key, np.uint64) < np.uint64(self.fraction * 2**64)

  def cut(self, file: SourceFile, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a file, each held-out block a document of its own, and so what lies between.

    Parts of a document with even numbers are for training, those with odd ones for validation.
    They begin at the next line behind a border, if there is one soon.
    """
    borders, part, at, starts = [], 0, 0, True
    for piece in pieces:
      if piece.starts:
        ranges = self.blocks.get(document_name(file, piece.line), ())
        borders, part, at, starts = [b for pair in ranges for b in pair], 0, 0, True
      text = piece.text
      while part < len(borders) and borders[part] - at < len(text):
        end = self._line_end(text, borders[part] - at)
        if end:
          yield Piece(piece.line, starts, text[:end], part)
        text, at, part, starts = text[end:], at + end, part + 1, True
      if text:
        yield Piece(piece.line, starts, text, part)
        at, starts = at + len(text), False

  def _line_end(self, text: str, border: int) -> int:
    soon = border + self.block // 2
    ends = (text.find(sign, border, soon) + 1 for sign in "\n " if border)
    return next(filter(None, ends), border)

  def cut_ids(self, name: str, length: int) -> Iterator[tuple[int, int, int]]:
    """(part, begin, end) of each part of a document of a token file."""
    borders = [b for pair in self.blocks.get(name, ()) for b in pair]
    edges = [0, *(min(b, length) for b in borders), length]
    for part, (begin, end) in enumerate(itertools.pairwise(edges)):
      if begin < end:
        yield part, begin, end


def plan_split(
  cfg: DataConfig,
  fraction: float,
  files: list[SourceFile],
  fingerprint: str,
  tokenizer: Tokenizer | None,
) -> Split:
  """How these files are split; what was found once is kept in the cache.

  Documents are held out whole if so many are expected, one or more, and both sides get some.
  Otherwise blocks are cut out of them, a share `fraction` of all, those whose hashes are lowest.

  Args:
    cfg: `format.text_field`, `strict` and `cache_dir` are read.
    fraction: to hold out.
    files: from `find_files`.
    fingerprint: a hash of their names and contents.
    tokenizer: says where documents of token files end; None = those files do not count.

  Raises:
    ValueError: if `cfg.strict` and something is malformed.
  """
  if not fraction:
    return Split(0.0)
  ids = tokenizer.fingerprint if tokenizer else ""
  key = cache.digest("split", fingerprint, fraction, cfg.format.text_field, ids)
  memo = cache.cache_root(cfg.cache_dir) / f"split-{key}.json"
  split = _remembered(memo)
  if split is None:
    sizes = _sizes(cfg, fraction, files, tokenizer)
    split = Split(fraction) if sizes is None else _in_blocks(sizes, fraction)
    cache.write_atomically(memo, json.dumps(dataclasses.asdict(split)))
  if split.why:
    logging.warning("%s", split.why)
  return split


def _remembered(memo: Path) -> Split | None:
  try:
    return Split(**json.loads(memo.read_text()))
  except (FileNotFoundError, ValueError, TypeError):  # none, or damaged: made again
    return None


def _sizes(
  cfg: DataConfig, fraction: float, files: list[SourceFile], tokenizer: Tokenizer | None
) -> dict[str, int] | None:
  """The size of each document by name; None as soon as they can be split whole."""
  split, sizes, sides = Split(fraction), {}, set()
  for name, size in _documents(cfg, files, tokenizer):
    sizes[name] = size
    sides.add(bool(split.held_out(name_hash(name), 0)))
    if (len(sides) == 2 and len(sizes) * fraction >= 1) or len(sizes) > _MOST_DOCUMENTS:
      return None
  return sizes


def _documents(
  cfg: DataConfig, files: list[SourceFile], tokenizer: Tokenizer | None
) -> Iterator[tuple[str, int]]:
  report = Report(strict=cfg.strict)
  for file in files:
    if file.kind != "tokens":
      line, size = 0, 0
      for piece in read_pieces(file, cfg.format.text_field, report):
        if piece.starts and size:
          yield document_name(file, line), size
          size = 0
        line, size = piece.line, size + len(piece.text)
      if size:
        yield document_name(file, line), size
    elif tokenizer:
      lines, _, lengths = token_documents(
        file.path, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id, report=report,
      )  # fmt: skip
      for line, length in zip(lines.tolist(), lengths.tolist(), strict=True):
        yield document_name(file, line), length


def _in_blocks(sizes: dict[str, int], fraction: float) -> Split:
  total = sum(sizes.values())
  size = min(max(int(total * fraction / _WANTED), _LEAST_BLOCK), _MOST_BLOCK)
  count = {name: max(1, length // size) for name, length in sizes.items()}
  if sum(count.values()) < _LEAST_BLOCKS:
    why = (
      f"Too little text to hold any of it out for validation: {total:,} characters or ids. The run "
      "has no validation loss. --config.data.validation_paths=FILE validates on other text."
    )
    return Split(0.0, why=why if sizes else "")
  blocks = sorted(
    (name_hash(f"{name}[{i}]"), name, i) for name in sizes for i in range(count[name])
  )
  chosen = sorted(block[1:] for block in blocks[: max(1, round(fraction * len(blocks)))])
  held: dict[str, list[list[int]]] = {}
  for name, i in chosen:
    begin, end = i * size, sizes[name] if i + 1 == count[name] else (i + 1) * size
    ranges = held.setdefault(name, [])
    if ranges and ranges[-1][1] == begin:
      ranges[-1][1] = end
    else:
      ranges.append([begin, end])
  share = sum(end - begin for ranges in held.values() for begin, end in ranges) / total
  documents = f"{len(sizes):,} document{'s' * (len(sizes) > 1)}"
  why = (
    f"Too few documents to hold out whole ones (data.validation_fraction={fraction:g} of "
    f"{documents}). Held out for validation: {len(chosen):,} of {len(blocks):,} blocks of about "
    f"{size:,} characters or ids inside them, {share:.1%} of the text, chosen by hash."
  )
  return Split(fraction, size, held, why)
