"""Short blocks from all over a split: a small sample that stands for it."""

import numpy as np

from ats_jax.config.schema.orchestrator import PROBE_POSITIONS
from ats_jax.data.rows.contract import Rows

SHORT = PROBE_POSITIONS  # in a block, where rows are longer


def sample_blocks(
  dataset: Rows, count: int, reported: int, length: int = SHORT
) -> tuple[dict[str, np.ndarray], bool]:
  """`count` blocks, spread evenly over the rows after the first `reported`, if those are enough.

  Otherwise they are spread over all rows. A split smaller than `count` blocks is padded.

  Args:
    dataset: a split with rows.
    count: how many.
    reported: rows at the beginning that serve another purpose.
    length: positions in a block, where rows are longer.

  Returns:
    Arrays [count, min(length, seq_len)], and whether all of them are of rows from `reported` on.
  """
  parts = max(1, dataset.info.seq_len // length)
  apart = (dataset.info.num_rows - reported) * parts >= count
  first = reported if apart else 0
  rows = dataset.info.num_rows - first
  blocks = []
  for number in range(count):
    if rows >= count:  # a row each, and another part of each
      row, part = _evenly(number, count, rows), number % parts
    else:
      row, part = divmod(_evenly(number, min(count, rows * parts), rows * parts), parts)
    blocks.append(cut_block(dataset.read_once(np.array([first + row])), part, length))
  return {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}, apart


def _evenly(number: int, count: int, among: int) -> int:
  """Where the `number`-th of `count` points lies that divide `among` evenly."""
  return (2 * number + 1) * among // (2 * count)


def cut_block(row: dict[str, np.ndarray], part: int, length: int = SHORT) -> dict[str, np.ndarray]:
  """The `part`-th block of a row [1, seq], or the last one full of text, as a row of its own.

  A document that the block cuts off at its start begins there: its positions count from 0.
  """
  segments = row["segment_ids"]
  length = min(length, segments.shape[1])
  begin = max(0, min(part * length, np.count_nonzero(segments) - length))
  block = {name: values[:, begin : begin + length] for name, values in row.items()}
  ids, positions = block["segment_ids"], block["positions"]
  continued = ids == ids[:, :1]
  return block | {
    "segment_ids": np.where(ids > 0, ids - ids[:, :1] + 1, 0),
    "positions": np.where(continued, positions - positions[:, :1], positions),
  }
