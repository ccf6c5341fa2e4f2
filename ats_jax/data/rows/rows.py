"""Packed rows, of one text or of several sources: what loaders and evaluations ask of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ats_jax.data.tokens.tokenizer import Tokenizer


class Rows(Protocol):
  """Rows that can be read in order, e.g. held-out ones.

  Attributes:
    tokenizer: what made the ids.
    seq_len: positions in a row.
    num_rows: rows of an epoch.
    num_tokens: targets of an epoch: every text token and one eos a document.
    num_documents: documents that they are of.
    bytes_per_token: UTF-8 bytes of the text over `num_tokens`; 0 = unknown.
  """

  tokenizer: Tokenizer
  seq_len: int
  num_rows: int
  num_tokens: int
  num_documents: int
  bytes_per_token: float

  def rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """Rows by number, arrays [*indices.shape, seq_len]; those from `num_rows` on are padding."""
    ...


class TrainRows(Rows, Protocol):
  """Rows without end: row r of a run is a pure function of r.

  Attributes:
    fingerprint: names the content of every row.
    are_ready: whether all rows can be read at once; else `ahead` makes some.
  """

  fingerprint: str
  are_ready: bool

  @property
  def ids_used(self) -> int:
    """How many ids of the tokenizer are in the text; of several sources, in the richest one."""
    ...

  def row_length(self, row: int) -> int:
    """Positions in the rows of the step that row `row` is of; it divides `seq_len`."""
    ...

  def global_rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """The rows of training with these numbers; arrays of shape [*indices.shape, seq_len].

    If those of their step (`row_length`) are so many times shorter, there are as many times more:
    [..., rows x times, seq_len / times].
    """
    ...

  def position(self, row: int) -> dict[str, Any]:
    """What a checkpoint keeps in front of row `row`; JSON."""
    ...

  def row_of(self, position: Mapping[str, Any]) -> int:
    """The first row that a run at `position` has not read.

    Raises:
      ValueError: if the position is one in other data.
    """
    ...

  def news(self, first: int, end: int) -> Sequence[str]:
    """What begins in rows [first, end), in words for the log."""
    ...

  def in_words(self) -> str:
    """How much there is."""
    ...

  def epochs(self, row: int) -> float | None:
    """How often the text has been read before row `row`; None = that is not known."""
    ...

  def passes(self, row: int) -> dict[str, float | None]:
    """The same of each named source."""
    ...

  def ahead(self, row: int, going: Callable[[], bool]) -> None:
    """Make rows from row `row` on, as many as are kept; may take long.

    Args:
      row: of the run.
      going: whether to go on; asked often.

    Raises:
      ValueError: for text that cannot be used.
      InterruptedError: if `going` said no.
    """
    ...


class NoRows:
  """A split without a document; see `Rows`."""

  num_rows = num_tokens = num_documents = 0
  bytes_per_token = 0.0

  def __init__(self, tokenizer: Tokenizer, seq_len: int):
    self.tokenizer, self.seq_len = tokenizer, seq_len

  def rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """See `Rows`: there is none."""
    raise AssertionError("asked for rows of an empty split")
