"""Which source each row of a run is of, and which of its rows: a pure function of the row's number.

In each phase the sources take turns, in a fixed order that repeats. In the even order, after any
number of rows of a phase each source has had its share of them, to less than one row. In a random
one it has had its share after each period.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.data.corpus import cache

_RANDOM_ROWS = 4096  # of a period at least, where the order is random


class MixturePhase(NamedTuple):
  """A phase of a mixture, in which each source has a fixed share of the rows.

  Attributes:
    parts: shares as whole numbers: of `sum(parts)` rows, source i has `parts[i]`.
    rows: number of rows of the phase; 0 = it has no end.
  """

  parts: tuple[int, ...]
  rows: int = 0


class SourceRows(NamedTuple):
  """The source of each row of a run, and the row's number there.

  Attributes:
    source: int64, index of the source; the shape is that of the row numbers that were looked up.
    row: int64 of the same shape, number among the rows of that source, over the whole run.
  """

  source: np.ndarray
  row: np.ndarray


def even_order(parts: Sequence[int]) -> np.ndarray:
  """The sources of `sum(parts)` rows, spread evenly: [sum(parts)] int64.

  Row j (from 0) of a source with the share w may come from row floor(j / w) on and must come before
  row ceil((j + 1) / w). The one that must come first goes first. As the shares add up to 1 none is
  ever late (Baruah et al. 1996, "Proportionate progress"; Tijdeman 1980), so after any n rows a
  source has had more than n w - 1 and fewer than n w + 1.
  """
  total = sum(parts)
  waiting = [(0, source, 0) for source, part in enumerate(parts) if part]  # by when they may come
  ready: list[tuple[int, int, int]] = []  # by when they must have come
  order = np.empty(total, np.int64)
  for row in range(total):
    while waiting and waiting[0][0] <= row:
      _, source, j = heapq.heappop(waiting)
      heapq.heappush(ready, (-(-(j + 1) * total // parts[source]), source, j))
    due, source, j = heapq.heappop(ready)
    assert due > row
    order[row] = source
    heapq.heappush(waiting, ((j + 1) * total // parts[source], source, j + 1))
  return order


def random_order(parts: Sequence[int], seed: str) -> np.ndarray:
  """The sources of a multiple of `sum(parts)` rows, `_RANDOM_ROWS` at least, shuffled: [rows]."""
  order = np.tile(np.repeat(np.arange(len(parts)), parts), -(-_RANDOM_ROWS // sum(parts)))
  return shuffled(order, seed)


def shuffled(order: np.ndarray, seed: str) -> np.ndarray:
  """The same in another order, which depends on nothing but the seed."""
  first = int(cache.digest("turns", seed)[:16], 16)
  keys = np.arange(len(order), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(first)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
    keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
  return order[np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")]


class Schedule:
  """The order of all rows of a run; to look up a row takes as long wherever it is.

  Attributes:
    phases: the last one has no end, whatever its `rows` say.
    starts: [phases] the first row of each.
    seed: of a random order; None = it is the even one.
  """

  def __init__(self, phases: Sequence[MixturePhase], seed: int | None = None):
    """Make the tables: 16 bytes for each row of one period of a phase.

    Args:
      phases: at least one, each with a share for every source.
      seed: of a random order; None = the even one.
    """
    assert phases and len({len(stage.parts) for stage in phases}) == 1
    self.phases, self.seed = tuple(phases), seed
    self.starts = np.array([0, *itertools.accumulate(s.rows for s in phases[:-1])])
    self._orders = [
      even_order(stage.parts) if seed is None else random_order(stage.parts, f"{seed} {number}")
      for number, stage in enumerate(phases)
    ]
    count = len(phases[0].parts)  # [phases, sources] rows of each in a period
    self._parts = np.stack([np.bincount(order, minlength=count) for order in self._orders])
    self._ranks = [rank_in_source(order) for order in self._orders]
    self._before = np.zeros_like(self._parts)  # [phases, sources] rows of each before the phase
    for number, stage in enumerate(phases[:-1]):
      self._before[number + 1] = self._before[number] + self._within(number, stage.rows)

  def find(self, rows: np.ndarray) -> SourceRows:
    """Where these rows of the run come from."""
    rows = np.asarray(rows, np.int64)
    phase = self.phase(rows)
    source, row = np.empty(rows.shape, np.int64), np.empty(rows.shape, np.int64)
    for number in np.unique(phase):
      here = phase == number
      period, at = np.divmod(rows[here] - self.starts[number], len(self._orders[number]))
      which = self._orders[number][at]
      source[here] = which
      row[here] = (
        self._before[number, which]
        + period * self._parts[number, which]
        + self._ranks[number][at]
      )  # fmt: skip
    return SourceRows(source, row)

  def phase(self, rows: np.ndarray) -> np.ndarray:
    """The number of the phase of each row."""
    return np.searchsorted(self.starts, rows, "right") - 1

  def counts(self, rows: int) -> np.ndarray:
    """[sources] int64, how many of the first `rows` rows are of each."""
    number = int(self.phase(np.array(max(rows - 1, 0))))
    return self._before[number] + self._within(number, rows - int(self.starts[number]))

  @property
  def end(self) -> int:
    """The row behind the phases, by the rows of the last one too."""
    return int(self.starts[-1]) + self.phases[-1].rows

  def _within(self, number: int, rows: int) -> np.ndarray:
    """[sources] rows of each among the first `rows` of a phase."""
    period, at = divmod(rows, len(self._orders[number]))
    rest = np.bincount(self._orders[number][:at], minlength=self._parts.shape[1])
    return period * self._parts[number] + rest


def rank_in_source(order: np.ndarray) -> np.ndarray:
  """Return for each element of an order how many equal ones come before it: [rows] int64."""
  by_source = np.argsort(order, kind="stable")
  sizes = np.bincount(order)
  rank = np.empty_like(order)
  rank[by_source] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
  return rank
