"""Which rows and positions `bridge verify` compares, and when it says "the same"."""

import dataclasses

import numpy as np
import pytest

from ats_jax.bridge import parity


@pytest.mark.parametrize(
  ("points", "length", "left_out"),
  [
    ({}, 128, []),
    ({"model.window": 20}, 128, []),
    ({"model.window": 128, "sliding_window": 128}, 192, []),
    ({"model.window": 20, "original_max_position_embeddings": 4096}, 4160, []),
    ({"sliding_window": 4096, "model.rope_scaling.original_len": 8192}, 4160, ["original_len"]),
  ],
)
def test_rows_are_longer_than_windows_and_contexts(points, length, left_out):
  assert parity.row_length(points) == length
  lines = parity.not_reached(points, length)
  assert len(lines) == len(left_out)
  for line, name in zip(lines, left_out, strict=True):
    assert name in line and "--seq_len=8256" in line and "NOT compared" in line


def test_a_row_that_ends_at_the_window_does_not_pass_it():
  assert parity.not_reached({"model.window": 128}, 128)
  assert not parity.not_reached({"model.window": 128}, 129)


@pytest.mark.parametrize(
  ("length", "count"), [(1, 256), (128, 256), (257, 256), (4160, 256), (4160, 32), (4160, 1)]
)
def test_positions_are_spread_and_include_the_last(length, count):
  found = parity.spread(length, count)
  assert len(found) == min(length, count) and np.all(np.diff(found) > 0)
  assert found[-1] == length - 1 and (count == 1 or found[0] == 0)
  last = min(count // 2, parity.GREEDY_TOKENS, length)
  np.testing.assert_array_equal(found[len(found) - last :], np.arange(length - last, length))
  assert np.max(np.diff(found), initial=0) <= 2 * max(1, length // max(1, count - last))


def test_the_bound_is_that_of_rounding_and_never_zero():
  shape = (2, 3, 5)
  theirs = parity.Reference(
    np.zeros((2, 3), int), np.arange(3), np.full(shape, 40.0, np.float32), 2e-5, np.zeros((2, 1)),
    "float32",
  )  # fmt: skip
  assert theirs.bound == pytest.approx(5 * 2e-5)
  exact = dataclasses.replace(theirs, rounding=0.0)
  assert exact.bound == pytest.approx(16 * 2**-23 * 40)
  assert theirs.error(np.full(shape, 40.5)) == 0.5
  ours = np.full(shape, 40.0)
  ours[1, 2, 3] = np.nan
  assert not theirs.error(ours) <= theirs.bound
