"""The orders `buckets` and `length`: rows of several lengths, by how long the documents are."""

from collections.abc import Sequence

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.row_order import LEAST_LENGTH
from ats_jax.data.rows.buckets import LEAST_STEPS, PartedOrder
from ats_jax.data.rows.contract import Part, TrainingDocuments


class LengthBuckets(PartedOrder):
  """Each document in the shortest rows that hold it whole; steps of all lengths at random."""

  in_turn = False

  def divide(self, cfg: DataConfig, documents: TrainingDocuments) -> list[Part]:
    """Return the parts by length, the shortest first."""
    sizes, count = documents.sizes, cfg.order.num_lengths
    in_rows = sizes if documents.cuts else sizes[sizes <= cfg.seq_len]
    lengths = row_lengths(
      in_rows if len(in_rows) else sizes,
      seq_len=cfg.seq_len, count=count, batch_size=cfg.batch_size,
    )  # fmt: skip
    return by_length(sizes, documents.indices, lengths)


class ShortFirst(LengthBuckets):
  """The same rows, the shortest first in each epoch."""

  in_turn = True


def row_lengths(sizes: np.ndarray, *, seq_len: int, count: int, batch_size: int) -> tuple[int, ...]:
  """At most `count` lengths of rows, `seq_len` the last: quantiles of tokens, rounded up.

  Each is `seq_len` halved some times, and a multiple of LEAST_LENGTH. A length whose documents do
  not fill LEAST_STEPS steps is left out, and the next longer one has them.

  Args:
    sizes: [documents] positions of each (text tokens + 1).
    seq_len: positions of the longest rows.
    count: lengths at most.
    batch_size: rows of `seq_len` of a step.
  """
  lengths = [seq_len]
  while lengths[0] % (2 * LEAST_LENGTH) == 0:
    lengths.insert(0, lengths[0] // 2)
  ordered = np.sort(sizes)
  tokens = np.cumsum(ordered)
  marks = np.searchsorted(tokens, tokens[-1] * np.arange(1, count) / count)
  fits = np.searchsorted(lengths, np.minimum(ordered[marks], seq_len))
  chosen = sorted({*(lengths[i] for i in fits), seq_len})
  least = LEAST_STEPS * batch_size * seq_len
  while len(chosen) > 1:
    ends = np.searchsorted(ordered, chosen[:-1], "right")
    filled = [int(part.sum()) for part in np.split(ordered, ends)]
    few = int(np.argmin(filled))
    if filled[few] >= least:
      break
    del chosen[min(few, len(chosen) - 2)]  # the longest stays: it takes in the one below it
  return tuple(chosen)


def by_length(sizes: np.ndarray, documents: np.ndarray, lengths: Sequence[int]) -> list[Part]:
  """Documents by the shortest row that holds them whole; the last part has all that are longer.

  Args:
    sizes: [documents] positions of each.
    documents: indices of them into the corpus.
    lengths: of rows, rising.
  """
  which = np.searchsorted(lengths[:-1], sizes)
  parts, above = [], 0
  for number, length in enumerate(lengths):
    name = f"documents of {above + 1} to {length} tokens"
    if number == len(lengths) - 1:
      name = f"documents of {above + 1} tokens and more"
    parts.append(Part(name, length, documents[which == number]))
    above = length
  return parts
