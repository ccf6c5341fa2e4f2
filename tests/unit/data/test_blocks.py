"""Blocks that stand for a split: from all over it, and sound rows of their own."""

import numpy as np
import pytest
from loading import assert_same

from ats_jax.data.batch import FIELDS
from ats_jax.data.rows.blocks import SHORT, cut_block, sample_blocks
from ats_jax.data.rows.contract import Info
from ats_jax.data.tokens.tokenizer import ByteTokenizer


class Rows:
  """Rows of two documents whose tokens name row and position, the last fifth of each is padding."""

  def __init__(self, num_rows, seq_len):
    self.info = Info(ByteTokenizer(), seq_len, num_rows, num_tokens=0, num_documents=0)

  def read_once(self, rows):
    indices, seq_len = np.asarray(rows), self.info.seq_len
    at, third = np.arange(seq_len), seq_len // 3
    used = (at < seq_len * 4 // 5) & (indices < self.info.num_rows)[:, None]
    tokens = 10_000 * indices[:, None] + at
    rows = {
      "tokens": tokens, "targets": tokens + 1, "segment_ids": 1 + (at >= third),
      "positions": np.where(at >= third, at - third, at), "loss_mask": 1.0,
    }  # fmt: skip
    return {
      name: np.where(used, values, 0).astype(FIELDS[name].dtype) for name, values in rows.items()
    }


@pytest.mark.parametrize("seq_len", [16, SHORT, 4 * SHORT])
def test_blocks_come_from_all_of_the_split_but_for_what_is_reported(seq_len):
  blocks, apart = sample_blocks(Rows(1000, seq_len), 64, reported=200)
  rows = blocks["tokens"][:, 0] // 10_000
  assert apart and blocks["tokens"].shape == (64, min(SHORT, seq_len))
  assert rows.min() >= 200 and len(set(rows)) == 64
  assert (np.histogram(rows, bins=8, range=(200, 1000))[0] == 8).all()
  if seq_len > SHORT:  # and from all parts of rows
    assert set(blocks["tokens"][:, 0] % 10_000 // SHORT) == {0, 1, 2}


def test_where_too_few_rows_are_left_all_are_used_and_it_is_said():
  blocks, apart = sample_blocks(Rows(100, 16), 64, reported=40)
  assert not apart and (blocks["tokens"][:, 0] // 10_000).min() < 10
  blocks, apart = sample_blocks(Rows(100, 16), 64, reported=36)
  assert apart and sorted(blocks["tokens"][:, 0] // 10_000) == list(range(36, 100))


def test_a_split_smaller_than_the_sample_is_filled_with_padding():
  blocks, apart = sample_blocks(Rows(5, 16), 8, reported=0)
  assert not apart
  assert blocks["loss_mask"].any(axis=1).tolist() == [True] * 5 + [False] * 3
  blocks, _ = sample_blocks(Rows(5, 4 * SHORT), 64, reported=0)
  firsts = blocks["tokens"][blocks["loss_mask"].any(axis=1), 0]
  assert len(firsts) == 20  # each part of each row


def test_a_block_is_a_row_of_its_own():
  seq = 4 * SHORT
  row = Rows(9, seq).read_once(np.array([3]))
  block = cut_block(row, 1)  # from the middle of the first document into the second
  assert {x.shape for x in block.values()} == {(1, SHORT)}
  change = seq // 3 - SHORT
  assert block["segment_ids"][0].tolist() == [1] * change + [2] * (SHORT - change)
  want = [*range(change), *range(SHORT - change)]
  assert block["positions"][0].tolist() == want
  assert (block["targets"] == block["tokens"] + 1).all() and block["loss_mask"].all()
  last = cut_block(row, 3)  # half of the fourth part is padding: the last block that text fills
  assert last["loss_mask"].all() and last["tokens"][0, -1] == 30_000 + seq * 4 // 5 - 1
  short = Rows(9, 20).read_once(np.array([3]))
  assert_same(cut_block(short, 0), short)
