"""The contract of a batch: what the loader gives is what everybody else expects."""

import numpy as np

from ats_jax.data.batch import FIELDS, random_batch


def test_datasets_give_the_fields(numbered):
  rows = numbered([5, 9, 3], seq_len=8).read_once(range(2))
  assert {name: x.dtype for name, x in rows.items()} == {
    name: np.dtype(field.dtype) for name, field in FIELDS.items()
  }


def test_random_batches_are_packed_like_real_ones():
  batch = random_batch((2, 3, 10), vocab_size=7, segments=3)
  assert batch.keys() == FIELDS.keys()
  assert {x.shape for x in batch.values()} == {(2, 3, 10)}
  assert all(batch[name].dtype == field.dtype for name, field in FIELDS.items())
  assert batch["tokens"].max() < 7 and batch["loss_mask"].all()
  np.testing.assert_array_equal(batch["tokens"][..., 1:], batch["targets"][..., :-1])
  np.testing.assert_array_equal(batch["segment_ids"][1, 2], [1, 1, 1, 1, 2, 2, 2, 3, 3, 3])
  np.testing.assert_array_equal(batch["positions"][0, 1], [0, 1, 2, 3, 0, 1, 2, 0, 1, 2])
