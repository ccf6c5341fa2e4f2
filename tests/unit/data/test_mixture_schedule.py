"""Which source a row is of: exact shares, no row lost or repeated, the same wherever one starts."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ats_jax.data.rows.schedule import MixturePhase, Schedule, even_order, random_order


@st.composite
def turns(draw):
  """Phases of the same sources, each of a random length."""
  sources = draw(st.integers(1, 5))
  parts = st.lists(st.integers(0, 20), min_size=sources, max_size=sources).filter(any)
  lengths = draw(st.lists(st.integers(1, 120), min_size=0, max_size=3))
  seed = draw(st.sampled_from([None, 0, 1]))
  last = MixturePhase(tuple(draw(parts)))
  return Schedule([*(MixturePhase(tuple(draw(parts)), n) for n in lengths), last], seed)


def most_off(order, parts):
  """By how many rows a source is ahead or behind at most, exactly, over all prefixes."""
  of_source = np.cumsum(order[:, None] == np.arange(len(parts)), axis=0)
  due = np.arange(1, len(order) + 1)[:, None] * np.array(parts)
  return Fraction(int(np.abs(of_source * sum(parts) - due).max()), sum(parts))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
@settings(max_examples=40)
def test_shares_are_exact_to_less_than_a_row_on_every_prefix(parts):
  order = even_order(parts)
  assert np.bincount(order, minlength=len(parts)).tolist() == parts
  assert most_off(order, parts) < 1


@pytest.mark.parametrize("parts", [(66, *[1] * 34), (9973, 1, 26), tuple(range(1, 36)), (1,)])
def test_shares_of_uneven_sources(parts):
  """Among them many small ones, whose rows fall due together: largest-lag rules are off by more."""
  assert most_off(even_order(parts), parts) < 1


@pytest.mark.parametrize("parts", [(1, 1), (3, 0, 7), (5000, 1)])
def test_a_random_order_has_its_shares_in_each_period(parts):
  """It is no order of turns, another one with another seed, and the next period is as the first."""
  order = random_order(parts, "0 0")
  counts = np.bincount(order, minlength=len(parts))
  assert len(order) >= 4096 and (counts * sum(parts) == len(order) * np.array(parts)).all()
  assert (order != random_order(parts, "1 0")).any()
  found = Schedule([MixturePhase(parts)], 0).find(np.arange(2 * len(order)))
  np.testing.assert_array_equal(found.source, np.tile(order, 2))


def test_a_random_order_is_as_random_as_coins():
  """Of 4,096 rows of two sources: runs of one source, and shares of blocks, as chance has them."""
  order = random_order((1, 1), "0 0")
  changes = np.count_nonzero(np.diff(order))
  assert abs(changes - 2048) < 5 * 32  # five standard deviations
  blocks = order.reshape(64, 64).sum(1)
  assert 10 < blocks.var() < 24  # 16 expected; 0 of turns


@given(turns(), st.lists(st.integers(0, 10**12), min_size=1, max_size=8), st.integers(1, 400))
@settings(max_examples=40)
def test_each_row_of_a_source_comes_once_and_is_found_without_those_before_it(found, rows, first):
  place = found.find(np.arange(first))
  for source, count in enumerate(found.counts(first)):
    assert place.row[place.source == source].tolist() == list(range(count))
  together = found.find(np.array(rows))
  for row, source, own in zip(rows, *together, strict=True):
    alone = found.find(np.array(row))
    assert (alone.source, alone.row) == (source, own)
    before, behind = found.counts(row), found.counts(row + 1)
    assert before[source] == own and before.sum() == row
    assert (behind - before).tolist() == [int(s == source) for s in range(len(before))]


@given(turns())
@settings(max_examples=40)
def test_an_appended_phase_changes_no_row_before_it(found):
  last = found.phases[-1]
  end = int(found.starts[-1]) + 50
  longer = Schedule(
    [*found.phases[:-1], last._replace(rows=50), MixturePhase(last.parts[::-1])], found.seed
  )
  for before, after in zip(found.find(np.arange(end)), longer.find(np.arange(end)), strict=True):
    np.testing.assert_array_equal(before, after)


def test_phases_begin_at_their_row_and_a_source_without_a_part_never_comes():
  found = Schedule([MixturePhase((1, 0), 10), MixturePhase((0, 1), 4), MixturePhase((1, 1))])
  assert found.find(np.arange(14)).source.tolist() == [0] * 10 + [1] * 4
  assert found.counts(14).tolist() == [10, 4] and found.counts(18).tolist() == [12, 6]
  assert found.phase(np.array([0, 9, 10, 13, 14, 10**9])).tolist() == [0, 0, 1, 1, 2, 2]
  counts = Schedule([MixturePhase((1, 2, 0), 9), MixturePhase((1, 0, 0))]).counts(10**9)
  assert counts[0] > 10**8 and counts[1:].tolist() == [6, 0]
