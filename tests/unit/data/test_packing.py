import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ats_jax.data.rows import packing
from ats_jax.data.rows.packing import make_layout

MODES = ("concat", "first_fit", "best_fit")


@st.composite
def problems(draw):
  seq_len = draw(st.integers(1, 24))
  lengths = draw(st.lists(st.integers(1, 60) | st.integers(1, 3), max_size=60))
  order = draw(st.permutations(range(len(lengths))))
  return np.array(lengths, np.int64), np.array(order, np.int64), seq_len, draw(st.integers(1, 6))


@pytest.mark.parametrize("mode", MODES)
@given(problem=problems())
@settings(max_examples=200, deadline=None)
def test_every_position_once_and_rows_within_limits(mode, problem):
  lengths, order, seq_len, max_segments = problem
  plan = make_layout(lengths, order, seq_len=seq_len, packing=mode, max_segments=max_segments)
  seen = [np.zeros(n, int) for n in lengths]
  for d, b, n in zip(plan.document, plan.begin, plan.length, strict=True):
    assert n >= 1 and b + n <= lengths[d]
    seen[d][b : b + n] += 1
  assert all((s == 1).all() for s in seen)
  segments = np.diff(plan.first)
  assert plan.first[0] == 0 and plan.first[-1] == len(plan.document)
  if len(segments):
    assert segments.min() >= 1 and segments.max() <= max_segments
    fill = np.add.reduceat(plan.length, plan.first[:-1])
    assert fill.max() <= seq_len
  assert all(values.dtype == np.int64 for values in plan)


@given(problem=problems())
@settings(max_examples=200, deadline=None)
def test_concat_pads_only_where_it_must(problem):
  lengths, order, seq_len, max_segments = problem
  plan = make_layout(lengths, order, seq_len=seq_len, packing="concat", max_segments=max_segments)
  fill = np.add.reduceat(plan.length, plan.first[:-1]) if len(lengths) else np.zeros(0)
  full = (fill == seq_len) | (np.diff(plan.first) == max_segments)
  assert full[:-1].all()
  pieces = list(zip(plan.document, plan.begin, strict=True))
  rank = np.argsort(order)
  assert pieces == sorted(pieces, key=lambda piece: (rank[piece[0]], piece[1]))


@pytest.mark.parametrize("mode", MODES[1:])
@given(problem=problems())
@settings(max_examples=200, deadline=None)
def test_fitting_keeps_documents_whole_and_rows_full(mode, problem):
  lengths, order, seq_len, _ = problem
  plan = make_layout(lengths, order, seq_len=seq_len, packing=mode, max_segments=10**6)
  pieces = np.bincount(plan.document, minlength=len(lengths))
  assert (pieces == -(-lengths // seq_len)).all()
  fill = np.sort(np.add.reduceat(plan.length, plan.first[:-1])) if len(lengths) else np.zeros(0)
  assert len(fill) < 2 or fill[0] + fill[1] > seq_len  # no two rows would go into one


def test_best_fit_takes_the_tightest_row():
  lengths = np.array([6, 7, 3, 4])
  plan = make_layout(lengths, np.arange(4), seq_len=10, packing="best_fit", max_segments=9)
  rows = [sorted(row) for row in np.split(plan.document, plan.first[1:-1])]
  assert sorted(rows) == [[0, 3], [1, 2]]


def test_first_fit_takes_the_first_row_with_room():
  lengths = np.array([6, 7, 3, 4])
  plan = make_layout(lengths, np.arange(4), seq_len=10, packing="first_fit", max_segments=9)
  rows = [sorted(row) for row in np.split(plan.document, plan.first[1:-1])]
  assert rows == [[0, 2], [1], [3]]


def test_first_fit_with_more_rows_than_it_keeps_open(monkeypatch):
  monkeypatch.setattr(packing, "_WINDOW", 4)
  lengths = np.random.default_rng(0).integers(1, 33, 500)
  plan = make_layout(lengths, np.arange(500), seq_len=32, packing="first_fit", max_segments=64)
  assert np.bincount(plan.document, plan.length).tolist() == lengths.tolist()
  assert np.add.reduceat(plan.length, plan.first[:-1]).max() <= 32


@pytest.mark.parametrize(
  ("mode", "least"), [("concat", 0.999), ("first_fit", 0.93), ("best_fit", 0.99)]
)
def test_fill_of_a_realistic_corpus(mode, least):
  lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 5000).astype(np.int64) + 1
  plan = make_layout(lengths, np.arange(5000), seq_len=1024, packing=mode, max_segments=64)
  assert lengths.sum() / ((len(plan.first) - 1) * 1024) > least


@pytest.mark.parametrize("mode", MODES)
def test_row_numbers_say_nothing_about_length(mode):
  """A part of the rows, as in a short evaluation, must be like the whole."""
  lengths = np.random.default_rng(0).integers(1, 600, 4000)
  plan = make_layout(lengths, np.arange(4000), seq_len=512, packing=mode, max_segments=64)
  half = plan.first[len(plan.first) // 2]
  mean = [lengths[d].mean() for d in (plan.document[:half], plan.document[half:])]
  assert abs(mean[0] - mean[1]) < 0.1 * lengths.mean()


RECKLESS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("mode", MODES)
@given(
  lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
  seq_len=st.integers(8, 20),
  max_segments=st.integers(1, 5),
  seed=st.integers(0, 9),
)
@RECKLESS
def test_rows_hold_each_token_once_after_the_right_input(
  numbered, mode, lengths, seq_len, max_segments, seed
):
  """Reads real rows of a corpus in which each token has its own id."""
  ds = numbered(lengths, seed, seq_len=seq_len, packing=mode, max_segments=max_segments)
  batch = ds.read_once(range(ds.info.num_rows))
  assert {k: v.dtype for k, v in batch.items()} == {
    **dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32),
    "loss_mask": np.float32,
  }
  bos, eos, pad = ds.info.tokenizer.bos_id, ds.info.tokenizer.eos_id, ds.info.tokenizer.pad_id
  ends = np.cumsum(lengths)
  starts = set((ends - lengths).tolist())
  emitted = []
  for row in range(ds.info.num_rows):
    tokens, targets, segments, positions, mask = (batch[k][row] for k in (
      "tokens", "targets", "segment_ids", "positions", "loss_mask"))  # fmt: skip
    used = int((segments > 0).sum())
    assert (mask == (segments > 0)).all() and (segments[used:] == 0).all()
    assert (tokens[used:] == pad).all() and (targets[used:] == pad).all()
    assert (positions[used:] == 0).all()
    changes = np.flatnonzero(np.diff(segments[:used], prepend=0))
    assert segments[changes].tolist() == list(range(1, len(changes) + 1))
    assert len(changes) <= max_segments
    for begin, end in zip(changes, [*changes[1:], used], strict=True):
      assert positions[begin:end].tolist() == list(range(end - begin))
      assert (tokens[begin + 1 : end] == targets[begin : end - 1]).all()
      assert eos not in targets[begin : end - 1]
      first, last = int(tokens[begin]), int(targets[end - 1])
      if first == bos:
        assert targets[begin] in starts
      elif targets[begin] != eos:
        assert targets[begin] == first + 1 and first + 1 not in starts
      if last == eos:
        assert tokens[end - 1] + 1 in ends
    emitted.append(targets[:used])
  emitted = np.concatenate(emitted)
  assert sorted(emitted[emitted != eos]) == list(range(ends[-1]))
  assert (emitted == eos).sum() == ds.info.num_documents == len(lengths)
  assert len(emitted) == ds.info.num_tokens
