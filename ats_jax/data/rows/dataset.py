"""Packed rows. Row i of an epoch is a pure function of (fingerprint, seed, epoch, i)."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from ats_jax.data.corpus import cache
from ats_jax.data.corpus.corpus import Corpus
from ats_jax.data.rows.packing import Layout
from ats_jax.data.rows.rows import Rows
from ats_jax.data.tokens.tokenizer import Tokenizer

_PACKED = ("tokens", "targets", "segment_ids", "positions")  # of a batch's fields, by packing


class Dataset:
  """One split, tokenised and packed.

  Attributes:
    tokenizer: what made the ids.
    fingerprint: names the content of every row: documents, tokenizer, split, row length, packing.
    seed: of the order of documents and rows.
    seq_len: positions in a row.
    num_rows: rows of an epoch.
    num_tokens: targets of an epoch: every text token and one eos a document.
    num_documents: documents of the split.
    bytes_per_token: UTF-8 bytes of the text over `num_tokens`; 0 if token files hide them, or not
      all targets count alike.
    report: `malformed` and `skipped` (kind -> count), `first` (a few in words), `files` (all).
    corpus: the documents, of this split and of others.
    documents: [num_documents] int64, indices into the corpus.
    plan: which part of which document is where.
    weights: of conversations, [codes] float32, the weight in the loss of a target by its code
      (`chat.segments`); None = every target counts 1.
  """

  are_ready = True

  def __init__(
    self,
    corpus: Corpus,
    plan: cache.Folder,
    tokenizer: Tokenizer,
    *,
    fingerprint: str,
    seed: int,
    seq_len: int,
    report: dict[str, Any],
    weights: np.ndarray | None = None,
  ):
    self.corpus, self.tokenizer, self.report = corpus, tokenizer, report
    self.fingerprint, self.seed, self.seq_len = fingerprint, seed, seq_len
    self.weights = weights
    self._plan_folder = plan
    self.plan = Layout(*map(plan.array, Layout._fields))
    self.documents = plan.array("documents")
    self.num_rows = len(self.plan.first) - 1
    self.num_tokens: int = plan.meta["num_tokens"]
    self.num_documents: int = plan.meta["num_documents"]
    self.bytes_per_token: float = plan.meta["num_bytes"] / max(self.num_tokens, 1)
    self._shuffle_seed = int(cache.digest("rows", fingerprint, seed)[:8], 16)

  def __reduce__(self):
    make = functools.partial(
      Dataset, fingerprint=self.fingerprint, seed=self.seed, seq_len=self.seq_len,
      report=self.report, weights=self.weights,
    )  # fmt: skip
    return make, (self.corpus, self._plan_folder, self.tokenizer)

  @property
  def ids_used(self) -> int:
    """See `TrainRows`."""
    return self.corpus.ids_used

  def position(self, row: int) -> dict[str, Any]:
    """See `TrainRows`."""
    return {"row": row, "data": self.fingerprint}

  def row_of(self, position: Mapping[str, Any]) -> int:
    """See `TrainRows`.

    Raises:
      ValueError: if the position is one in other data.
    """
    check_same(self.fingerprint, position)
    return position["row"]

  def news(self, first: int, end: int) -> Sequence[str]:
    """See `TrainRows`: of epochs behind the first."""
    done = (end - 1) // self.num_rows
    if end <= first or done <= max(0, (first - 1) // self.num_rows):
      return ()
    return [f"all of its {self.num_rows:,} rows have been read; its epoch {done + 1:,} begins"]

  def in_words(self) -> str:
    """See `TrainRows`."""
    return in_words(self)

  def epochs(self, row: int) -> float | None:
    """See `TrainRows`."""
    return row / self.num_rows

  def passes(self, row: int) -> dict[str, float | None]:
    """See `TrainRows`: it has no name."""
    del row
    return {}

  def ahead(self, row: int, going: Callable[[], bool]) -> None:
    """See `TrainRows`: nothing is to be made."""

  def place(self, row: int) -> "tuple[Dataset, int]":
    """The dataset that row `row` of training is in, and its number in the plan of that."""
    return self, self.row_index(row)

  def counted(self) -> "Dataset":
    """The rows that `num_rows` counts."""
    return self

  def with_corpus(self, corpus: Any, tokenizer: Any) -> "Dataset":
    """The same rows of other documents of the same lengths (for the audit)."""
    other = copy.copy(self)
    other.corpus, other.tokenizer = corpus, tokenizer
    return other

  def row_index(self, global_row: int) -> int:
    """Which row of the plan is row `global_row` of training; each epoch has an order of its own."""
    epoch, i = divmod(global_row, self.num_rows)
    seed = (self._shuffle_seed + epoch * 0x9E3779B9) % 2**32
    return grain.experimental.index_shuffle(i, max_index=self.num_rows - 1, seed=seed, rounds=4)

  def row_length(self, row: int) -> int:
    """See `TrainRows`."""
    del row
    return self.seq_len

  def global_rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """The rows of training with these numbers; arrays of shape [*indices.shape, seq_len]."""
    indices = np.asarray(indices)
    rows = [self.row_index(int(r)) for r in indices.flat]
    return self.rows(np.array(rows, np.int64).reshape(indices.shape))

  def rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """Rows of the plan: arrays [*indices.shape, seq_len]."""
    indices = np.asarray(indices)
    return read_rows([(self, int(i)) for i in indices.flat], indices.shape)

  def codes(self, indices: np.ndarray | range) -> np.ndarray:
    """The codes of the targets of rows, [*indices.shape, seq_len] uint8; 0 where there are none."""
    indices = np.asarray(indices)
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
    """_PACKED of row i as [4, seq_len] int32; `i >= num_rows` gives a row of padding."""
    out = np.zeros((4, self.seq_len), np.int32)
    out[:2] = self.tokenizer.pad_id
    if i >= self.num_rows:
      return out
    first, end = self.plan.first[i], self.plan.first[i + 1]
    at = 0
    for segment, piece in enumerate(range(first, end), 1):
      document, length = int(self.plan.document[piece]), int(self.plan.length[piece])
      begin = int(self.plan.begin[piece])
      # Position p of a document is the input token p - 1 (bos before the first) with target p.
      ids = self.corpus.tokens(document, max(begin - 1, 0), begin + length)
      tokens, targets, segment_ids, positions = out[:, at : at + length]
      if begin == 0:
        tokens[0], tokens[1:], targets[: len(ids)] = self.tokenizer.bos_id, ids[: length - 1], ids
      else:
        tokens[:], targets[: len(ids) - 1] = ids[:length], ids[1:]
      if begin + length > self.corpus.length[document]:
        targets[-1] = self.tokenizer.eos_id
      segment_ids[:] = segment
      positions[:] = np.arange(length)
      at += length
    return out


def in_words(rows: Rows) -> str:
  """How much there is of them."""
  return (
    f"{rows.num_documents:,} documents, {rows.num_tokens:,} targets in {rows.num_rows:,} rows of "
    f"{rows.seq_len}"
  )


def read_rows(
  places: Sequence[tuple[Dataset, int]], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
  """Rows of plans, of datasets with one length of rows.

  Args:
    places: for each row, the dataset and the number in its plan.
    shape: of the rows; as many as there are places.

  Returns:
    Arrays [*shape, seq_len].
  """
  stacked = np.stack([ds._row(i) for ds, i in places], axis=1)
  fields = stacked.reshape(4, *shape, stacked.shape[-1])
  batch = dict(zip(_PACKED, fields, strict=True))
  mask = (stacked[_PACKED.index("segment_ids")] > 0).astype(np.float32)
  for row, (ds, i) in zip(mask, places, strict=True):
    if ds.weights is not None:
      row[:] = ds.weights[ds.codes(np.array([i]))[0]]
  return {**batch, "loss_mask": mask.reshape(*shape, -1)}


def check_same(fingerprint: str, position: Mapping[str, Any]) -> None:
  """Refuse a position in other data.

  Raises:
    ValueError: if it is one.
  """
  if position["data"] != fingerprint:
    raise ValueError(
      "the run was trained on other data: the text files, the tokenizer or the packing changed "
      f"since (fingerprint {position['data']}, now {fingerprint}). Restore them, or use another "
      "--workdir to train and --paths to evaluate."
    )
