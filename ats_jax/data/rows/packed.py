"""Documents that are packed into rows of one length."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ats_jax.data.corpus import cache
from ats_jax.data.corpus.corpus import Corpus
from ats_jax.data.rows.packing import Layout, context
from ats_jax.data.tokens.tokenizer import Tokenizer

_PACKED = ("tokens", "targets", "segment_ids", "positions")  # of a batch's fields, by packing


class Packed:
  """Rows of documents, in the order of a plan.

  Attributes:
    corpus: the documents, of this split and of others.
    tokenizer: the tokenizer of the ids.
    seq_len: positions in a row.
    num_rows: number of rows of the plan.
    documents: [num_documents] int64, indices into the corpus.
    plan: which part of which document is in which row.
    weights: of conversations, [codes] float32, the weight in the loss of a target by its code
      (`chat.segments`); None = every target counts 1.
    overlap: positions of context before a piece of a document; their targets count 0.
    second_code: of pairs, the code from which on tokens are of the second segment of a document; 0
      = a document is one segment.
    beside: further fields of rows by name: of each segment of each document of the corpus a number,
      [documents, segments], which stands at the segment's first position.
    counts: `num_documents`, `num_tokens` and `num_bytes` of the plan.
  """

  def __init__(
    self,
    corpus: Corpus,
    folder: cache.Folder,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    weights: np.ndarray | None = None,
    overlap: int = 0,
    second_code: int = 0,
    beside: Mapping[str, np.ndarray] | None = None,
  ):
    self.corpus, self.tokenizer = corpus, tokenizer
    self.seq_len, self.weights, self.overlap = seq_len, weights, overlap
    self.second_code, self.beside = second_code, dict(beside or {})
    self._folder, self.counts = folder, folder.meta
    self.plan = Layout(*map(folder.array, Layout._fields))
    self.documents = folder.array("documents")
    self.num_rows = len(self.plan.first) - 1

  def __reduce__(self):
    make = functools.partial(
      Packed,
      seq_len=self.seq_len,
      weights=self.weights,
      overlap=self.overlap,
      second_code=self.second_code,
      beside=self.beside,
    )
    return make, (self.corpus, self._folder, self.tokenizer)

  def with_corpus(self, corpus: Any, tokenizer: Any) -> "Packed":
    """The same rows of other documents of the same lengths."""
    other = copy.copy(self)
    other.corpus, other.tokenizer = corpus, tokenizer
    return other

  def with_beside(self, **beside: np.ndarray) -> "Packed":
    """The same rows with further fields."""
    other = copy.copy(self)
    other.beside = self.beside | beside
    return other

  def documents_in(self, i: int) -> np.ndarray:
    """Indices into the corpus of the documents in row `i` of the plan, in order."""
    return self.plan.document[slice(*self.plan.first[i : i + 2])]

  def document_names(self, i: int) -> tuple[str, ...]:
    """Of the documents in row `i` of the plan, in order."""
    return tuple(self.corpus.name(int(document)) for document in self.documents_in(i))

  def codes(self, rows: np.ndarray | range) -> np.ndarray:
    """The codes of the targets of rows, [*rows.shape, seq_len] uint8; 0 where there are none."""
    indices = np.asarray(rows)
    out = np.zeros((indices.size, self.seq_len), np.uint8)
    for row, i in zip(out, map(int, indices.flat), strict=True):
      at = 0
      for piece in range(*self.plan.first[i : i + 2]) if i < self.num_rows else ():
        begin, length = int(self.plan.begin[piece]), int(self.plan.length[piece])
        codes = self.corpus.codes(int(self.plan.document[piece]), begin, begin + length)
        row[at : at + len(codes)] = codes  # the eos behind a document has none
        at += length
    return out.reshape(*indices.shape, self.seq_len)

  def _row(self, i: int) -> np.ndarray:
    """_PACKED of row i, and whether its targets count, as [5, seq_len] int32.

    `i >= num_rows` gives a row of padding.
    """
    out = np.zeros((5, self.seq_len), np.int32)
    out[:2] = self.tokenizer.pad_id
    if i >= self.num_rows:
      return out
    first, end = self.plan.first[i], self.plan.first[i + 1]
    at = 0
    for number, piece in enumerate(range(first, end)):
      document, begin = int(self.plan.document[piece]), int(self.plan.begin[piece])
      before = int(context(begin, self.overlap))
      begin, length = begin - before, int(self.plan.length[piece]) + before
      # Position p of a document is the input token p - 1 (bos before the first) with target p.
      ids = self.corpus.tokens(document, max(begin - 1, 0), begin + length)
      tokens, targets, segment_ids, positions, counts = out[:, at : at + length]
      if begin == 0:
        tokens[0], tokens[1:], targets[: len(ids)] = self.tokenizer.bos_id, ids[: length - 1], ids
      else:
        tokens[:], targets[: len(ids) - 1] = ids[:length], ids[1:]
      if begin + length > self.corpus.length[document]:
        targets[-1] = self.tokenizer.eos_id
      segment_ids[:] = number + 1
      positions[:] = np.arange(length)
      if self.second_code:
        second = int(np.argmax(self.corpus.codes(document, 0, length) >= self.second_code))
        segment_ids[:] = 2 * number + 1
        tokens[second] = self.tokenizer.bos_id
        segment_ids[second:] += 1
        positions[second:] -= second
      counts[before:] = 1
      at += length
    return out


def read_rows(
  places: Sequence[tuple[Packed, int]], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
  """Rows of plans that have one length of rows; those behind the end of a plan are padding.

  Args:
    places: for each row, the packed documents and its number in their plan.
    shape: of the rows; as many as there are places.

  Returns:
    Arrays [*shape, seq_len].
  """
  stacked = np.stack([packed._row(i) for packed, i in places], axis=1)
  *fields, counts = stacked.reshape(5, *shape, stacked.shape[-1])
  batch = dict(zip(_PACKED, fields, strict=True))
  mask = counts.reshape(len(places), -1).astype(np.float32)
  for row, (packed, i) in zip(mask, places, strict=True):
    if packed.weights is not None:
      row[:] = packed.weights[packed.codes(np.array([i]))[0]]
  ids = batch["segment_ids"].reshape(len(places), -1)
  further = {name: _beside(name, ids, places).reshape(*shape, -1) for name in places[0][0].beside}
  return {**batch, "loss_mask": mask.reshape(*shape, -1), **further}


def _beside(name: str, segment_ids: np.ndarray, places: Sequence[tuple[Packed, int]]) -> np.ndarray:
  """A field of `Packed.beside` in rows, [rows, seq_len] float32."""
  out = np.zeros(segment_ids.shape, np.float32)
  for row, ids, (packed, i) in zip(out, segment_ids, places, strict=True):
    if i < packed.num_rows:
      starts = np.flatnonzero(np.diff(ids, prepend=0) * (ids > 0))
      row[starts] = packed.beside[name][packed.documents_in(i)].ravel()
  return out
