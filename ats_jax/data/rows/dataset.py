"""Packed rows. Row i of an epoch is a pure function of (fingerprint, seed, epoch, i)."""

from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from ats_jax.data.corpus import cache
from ats_jax.data.rows.contract import Info, Progress, TrainRows
from ats_jax.data.rows.packed import Packed, read_rows


class Dataset(TrainRows):
  """One split, tokenised and packed; each epoch has an order of its own.

  Attributes:
    info: facts about the rows, with the packed documents.
  """

  def __init__(self, packed: Packed, *, fingerprint: str, seed: int, report: Mapping[str, Any]):
    """Set the order.

    Args:
      packed: the documents in rows. Their bytes are 0 if token files hide them, or not all targets
        count alike.
      fingerprint: names the content of every row.
      seed: seed of the order of documents and rows.
      report: counts of what was left out, as of `Info.report`.
    """
    num_tokens = packed.counts["num_tokens"]
    self.info = Info(
      tokenizer=packed.tokenizer,
      seq_len=packed.seq_len,
      num_rows=packed.num_rows,
      num_tokens=num_tokens,
      num_documents=packed.counts["num_documents"],
      bytes_per_token=packed.counts["num_bytes"] / max(num_tokens, 1),
      fingerprint=fingerprint,
      ids_used=packed.corpus.ids_used,
      report=report,
      packed=packed,
    )
    self._shuffle_seed = int(cache.digest("rows", fingerprint, seed)[:8], 16)

  @property
  def packed(self) -> Packed:
    """Its documents, in the order of the plan."""
    assert self.info.packed is not None
    return self.info.packed

  def row_index(self, row: int) -> int:
    """Which row of the plan is row `row` of a run."""
    epoch, i = divmod(row, self.info.num_rows)
    seed = (self._shuffle_seed + epoch * 0x9E3779B9) % 2**32
    last = self.info.num_rows - 1
    return grain.experimental.index_shuffle(i, max_index=last, seed=seed, rounds=4)

  def read_once(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return rows of the split by number, in the order of the packing plan."""
    rows = np.asarray(rows)
    return read_rows([(self.packed, int(row)) for row in rows.flat], rows.shape)

  def read(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return the rows of a run with these numbers, as arrays [*rows.shape, seq_len]."""
    rows = np.asarray(rows)
    return read_rows([(self.packed, self.row_index(int(row))) for row in rows.flat], rows.shape)

  def documents(self, row: int) -> tuple[str, ...]:
    """Return the names of the documents in row `row` of a run."""
    return self.packed.document_names(self.row_index(row))

  def progress(self, row: int, since: int | None = None) -> Progress:
    """Return the progress at `row`. Epochs after the first are news."""
    size, news = self.info.num_rows, []
    begun = (row - 1) // size
    if since is not None and row > since and begun > max(0, (since - 1) // size):
      news = [f"all of its {size:,} rows have been read; its epoch {begun + 1:,} begins"]
    return Progress(row / size, news=news)
