"""Packed rows, of one text or of several sources: what loaders and evaluations ask of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ats_jax.data.tokenizer import Tokenizer


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
  """

  fingerprint: str

  @property
  def ids_used(self) -> int:
    """How many ids of the tokenizer are in the text; of several sources, in the richest one."""
    ...

  def global_rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """The rows of training with these numbers; arrays of shape [*indices.shape, seq_len]."""
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

  def passes(self, row: int) -> dict[str, float]:
    """How often each named source has been read before row `row`."""
    ...
