import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ats_jax.data.rows import packing
from ats_jax.data.rows.packing import make_layout

MODES = ("concat", "first_fit", "best_fit")


@st.composite
def problems(draw):
  seq_len = draw(st.integers(1, 24))
  lengths = draw(st.lists(st.integers(1, 60) | st.integers(1, 3), max_size=60))
  order = draw(st.permutations(range(len(lengths))))
  max_segments = draw(st.integers(1, 6) | st.just(10**6))
  overlap = draw(st.integers(0, seq_len - 1))
  return np.array(lengths, np.int64), np.array(order, np.int64), seq_len, max_segments, overlap


@pytest.mark.parametrize("mode", MODES)
@given(problem=problems())
@settings(max_examples=100)
def test_every_position_once_and_rows_are_full_within_their_limits(mode, problem):
  lengths, order, seq_len, max_segments, overlap = problem
  plan = make_layout(
    lengths, order, seq_len=seq_len, packing=mode, max_segments=max_segments, overlap=overlap
  )
  seen = [np.zeros(n, int) for n in lengths]
  for d, b, n in zip(plan.document, plan.begin, plan.length, strict=True):
    assert n >= 1 and b + n <= lengths[d]
    seen[d][b : b + n] += 1
  assert all((s == 1).all() for s in seen)
  assert all(values.dtype == np.int64 for values in plan)
  segments = np.diff(plan.first)
  assert plan.first[0] == 0 and plan.first[-1] == len(plan.document)
  if not len(segments):
    return
  fill = np.add.reduceat(plan.length + np.minimum(plan.begin, overlap), plan.first[:-1])
  assert segments.min() >= 1 and segments.max() <= max_segments and fill.max() <= seq_len
  if mode == "concat":
    assert ((fill == seq_len) | (segments == max_segments))[:-1].all()
    rank = np.argsort(order)
    pieces = [(rank[d], b) for d, b in zip(plan.document, plan.begin, strict=True)]
    assert pieces == sorted(pieces)
  elif max_segments == 10**6:
    pieces = np.bincount(plan.document, minlength=len(lengths))
    beyond = np.maximum(lengths - seq_len, 0)
    assert (pieces == 1 + -(-beyond // (seq_len - overlap))).all()  # documents are whole
    assert len(fill) < 2 or np.sort(fill)[:2].sum() > seq_len  # no two rows would go into one


@pytest.mark.parametrize("mode", MODES)
def test_a_piece_has_room_for_its_context(mode):
  """A row of 10 holds 7 more positions of a document that goes on, behind 3 it had before."""
  plan = make_layout(
    np.array([25]), np.arange(1), seq_len=10, packing=mode, max_segments=9, overlap=3
  )
  assert sorted(zip(plan.begin, plan.length, strict=True)) == [(0, 10), (10, 7), (17, 7), (24, 1)]


@pytest.mark.parametrize(
  ("mode", "expected"),
  [("best_fit", [[0, 3], [1, 2]]), ("first_fit", [[0, 2], [1], [3]])],
)
def test_which_row_with_room_is_taken(mode, expected):
  plan = make_layout(np.array([6, 7, 3, 4]), np.arange(4), seq_len=10, packing=mode, max_segments=9)
  assert sorted(sorted(row) for row in np.split(plan.document, plan.first[1:-1])) == expected


def test_first_fit_with_more_rows_than_it_keeps_open(monkeypatch):
  monkeypatch.setattr(packing, "_WINDOW", 4)
  lengths = np.random.default_rng(0).integers(1, 33, 500)
  plan = make_layout(lengths, np.arange(500), seq_len=32, packing="first_fit", max_segments=64)
  assert np.bincount(plan.document, plan.length).tolist() == lengths.tolist()
  assert np.add.reduceat(plan.length, plan.first[:-1]).max() <= 32


@pytest.mark.parametrize(
  ("mode", "least"), [("concat", 0.999), ("first_fit", 0.93), ("best_fit", 0.99)]
)
def test_fill_of_a_realistic_corpus_and_each_half_is_like_the_whole(mode, least):
  """Row numbers say nothing about length: a short evaluation reads a part of the rows."""
  lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 5000).astype(np.int64) + 1
  plan = make_layout(lengths, np.arange(5000), seq_len=1024, packing=mode, max_segments=64)
  assert lengths.sum() / ((len(plan.first) - 1) * 1024) > least
  lengths = np.random.default_rng(0).integers(1, 600, 4000)
  plan = make_layout(lengths, np.arange(4000), seq_len=512, packing=mode, max_segments=64)
  half = plan.first[len(plan.first) // 2]
  mean = [lengths[d].mean() for d in (plan.document[:half], plan.document[half:])]
  assert abs(mean[0] - mean[1]) < 0.1 * lengths.mean()
