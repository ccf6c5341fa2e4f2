"""The contract of rows: what the loader, evaluations and the commands that look at data ask for.

A new kind of rows is one class that extends `TrainRows` and has `info`, `read_once`, `read` and
`progress`. Whatever it reads is in its `info`: packed documents, or parts that are rows themselves.

A new order of rows is one class that extends `RowOrder`: it makes rows of the documents of a text.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus.corpus import Corpus
from ats_jax.data.rows.packed import Packed
from ats_jax.data.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Info:
  """Facts about rows.

  Attributes:
    tokenizer: the tokenizer of the ids.
    seq_len: positions in a row.
    num_rows: rows of an epoch.
    num_tokens: targets of an epoch: every text token and one eos a document.
    num_documents: documents that they are of.
    bytes_per_token: UTF-8 bytes of the text over `num_tokens`; 0 = unknown.
    fingerprint: names the content of every row: documents, tokenizer, split, row length, packing.
    ids_used: number of ids of the tokenizer in the text; of several sources, in the richest one.
    is_complete: whether the counts are of the whole text; False = of its beginning.
    scheduled_rows: number of rows that a schedule covers; 0 = there is no schedule.
    batch_size: rows of a step, where their order depends on it; 0 = it does not.
    report: counts of what was left out: `malformed`, `skipped` (kind -> count), `first` (in words),
      `files` (all).
    parts: rows that these are made of: sources of a mixture, or documents of one length, by name.
    packed: the documents that are in the rows; None if they are in `parts`, or not packed.
    summary: the amount of text, for the log; "" = the counts say it.
  """

  tokenizer: Tokenizer
  seq_len: int
  num_rows: int
  num_tokens: int
  num_documents: int
  bytes_per_token: float = 0.0
  fingerprint: str = ""
  ids_used: int = 0
  is_complete: bool = True
  scheduled_rows: int = 0
  batch_size: int = 0
  report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parts: "Mapping[str, TrainRows]" = dataclasses.field(default_factory=dict)
  packed: Packed | None = None
  summary: str = ""

  def in_words(self) -> str:
    """How much there is."""
    return self.summary or (
      f"{self.num_documents:,} documents, {self.num_tokens:,} targets in {self.num_rows:,} rows of "
      f"{self.seq_len}"
    )


def info_of(
  parts: "Mapping[str, TrainRows]", tokenizer: Tokenizer, *, seq_len: int, num_rows: int
) -> Info:
  """The facts about rows that are made of all rows of `parts`: the sums of theirs."""
  infos = [part.info for part in parts.values()]
  num_tokens = sum(info.num_tokens for info in infos)
  is_known = all(info.bytes_per_token for info in infos if info.num_tokens)
  num_bytes = sum(info.bytes_per_token * info.num_tokens for info in infos)
  return Info(
    tokenizer=tokenizer,
    seq_len=seq_len,
    num_rows=num_rows,
    num_tokens=num_tokens,
    num_documents=sum(info.num_documents for info in infos),
    bytes_per_token=num_bytes / max(num_tokens, 1) if is_known else 0.0,
    ids_used=max(info.ids_used for info in infos),
    is_complete=all(info.is_complete for info in infos),
    parts=parts,
  )


@dataclasses.dataclass(frozen=True)
class Progress:
  """How far a run is that has read some rows.

  Attributes:
    epochs: number of passes over the text, with fractions; None = unknown.
    passes: the same of each source that metrics name.
    rows: number of rows of each of `Info.parts` that were read, over the run.
    news: what has begun since an earlier row, in words for the log.
  """

  epochs: float | None
  passes: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
  rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
  news: Sequence[str] = ()


class Rows(Protocol):
  """Rows that are read in order once, e.g. held-out ones."""

  info: Info

  def read_once(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Rows by number, arrays [*rows.shape, seq_len]; those from `num_rows` on are padding."""
    ...


class TrainRows(Rows, Protocol):
  """Rows without end: row r of a run is a pure function of r. Processes read a pickle of them."""

  def read(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """The rows of a run with these numbers; arrays of shape [*rows.shape, seq_len].

    If those of their step (`length`) are so many times shorter, there are as many times more:
    [..., rows x times, seq_len / times].
    """
    ...

  def progress(self, row: int, since: int | None = None) -> Progress:
    """How far a run is in front of row `row`, with the news of rows [since, row)."""
    ...

  def length(self, row: int) -> int:
    """Positions in the rows of the step that row `row` is of; it divides `seq_len`."""
    del row
    return self.info.seq_len

  def documents(self, row: int) -> tuple[str, ...]:
    """Names of the documents in row `row` of a run, with their files; () = they are not known."""
    del row
    return ()

  def position(self, row: int) -> dict[str, Any]:
    """What a checkpoint keeps in front of row `row`; JSON."""
    by_steps = {"batch_size": self.info.batch_size} if self.info.batch_size else {}
    return {"row": row, "data": self.info.fingerprint, **by_steps}

  def row_of(self, position: Mapping[str, Any]) -> int:
    """The first row that a run at `position` has not read.

    Raises:
      ValueError: if the position is one in other data.
    """
    was = position.get("batch_size", self.info.batch_size)
    if was != self.info.batch_size and self.info.batch_size:
      raise ValueError(
        f"data.batch_size={self.info.batch_size}, but the run was trained with {was}, and with "
        "this data.order the steps decide which rows come when. Go on with "
        f"--config.data.batch_size={was}, or use another --workdir."
      )
    saved, own = position["data"], self.info.fingerprint
    if saved != own:
      raise ValueError(
        "the run was trained on other data: the text files, the tokenizer or the packing changed "
        f"since (fingerprint {saved}, now {own}). Restore them, or use another --workdir to train "
        "and --paths to evaluate."
      )
    return position["row"]

  def prepare(self, row: int, going: Callable[[], bool]) -> Iterable[None]:
    """Make rows from row `row` on, as many as are kept: a piece for each element that is asked for.

    Args:
      row: number of a row of the run.
      going: whether to go on; asked often.

    Raises:
      ValueError: for text that cannot be used.
      InterruptedError: if `going` said no.
    """
    del row, going
    return ()


@dataclasses.dataclass(frozen=True)
class TrainingDocuments:
  """The documents of which an order makes the training rows of a text.

  Attributes:
    corpus: the documents of the text, held-out ones too.
    indices: [documents] int64, those in `corpus` to train on.
    tokenizer: the tokenizer of the ids.
    key: names the documents and their ids, for what an order keeps in the cache; JSON.
    cuts: whether a document that is longer than a row is cut; else it is left out.
    pack: makes rows of `data.seq_len`, shuffled in each epoch, given the settings, the seed, the
      indices of documents and a name of them for the log and the fingerprint.
  """

  corpus: Corpus
  indices: np.ndarray
  tokenizer: Tokenizer
  key: Sequence[Any]
  cuts: bool
  pack: Callable[[DataConfig, int, np.ndarray, str], TrainRows]

  @property
  def sizes(self) -> np.ndarray:
    """[documents] positions of each: its tokens and one eos."""
    return self.corpus.length[self.indices] + 1


class Part(NamedTuple):
  """Training documents that are packed together, into rows of one length.

  Attributes:
    name: what the documents have in common, in words, for logs and metrics.
    seq_len: positions in a row; it divides `data.seq_len`.
    documents: [documents] int64, indices into the corpus.
  """

  name: str
  seq_len: int
  documents: np.ndarray


@runtime_checkable
class RowOrder(Protocol):
  """How the documents of a text become training rows: a kind of `data.order`.

  One is registered by name in `ats_jax.extensions.orders`, as what makes it when it is called.
  """

  def rows(self, cfg: DataConfig, documents: TrainingDocuments, seed: int) -> TrainRows:
    """The training rows, of an order by `seed`."""
    ...

  def parts(self, cfg: DataConfig, documents: TrainingDocuments) -> Sequence[Part]:
    """The documents that are packed apart, in the order of training; () = they all go together."""
    del cfg, documents
    return ()


class NoRows(TrainRows):
  """A split without a document."""

  def __init__(self, tokenizer: Tokenizer, seq_len: int):
    self.info = Info(tokenizer, seq_len, num_rows=0, num_tokens=0, num_documents=0)

  def read_once(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """There is none."""
    raise AssertionError("asked for rows of an empty split")

  read = read_once

  def progress(self, row: int, since: int | None = None) -> Progress:
    """There is none."""
    del row, since
    return Progress(None)


def leaf_rows(rows: Rows, name: str = "") -> Iterator[tuple[str, Rows]]:
  """Yield the rows that have no parts, each with the names of the parts that lead to it."""
  if not rows.info.parts:
    yield name, rows
  for part_name, part in rows.info.parts.items():
    yield from leaf_rows(part, f"{name} {part_name}".strip())


def with_documents[R: Rows](rows: R, change: Callable[[Packed], Packed]) -> R:
  """The same rows of other documents of the same lengths."""
  info, other = rows.info, copy.copy(rows)
  parts = {name: with_documents(part, change) for name, part in info.parts.items()}
  packed = info.packed and change(info.packed)
  other.info = dataclasses.replace(info, parts=parts, packed=packed)
  return other
