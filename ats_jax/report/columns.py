"""The metrics of a run as columns: steps and values of each by name."""

import itertools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.metrics.rows import jsonl_rows
from ats_jax.store.paths import Path

BATCH = 4096  # rows that are held at once


class Column(NamedTuple):
  """A metric: the steps at which it was written, and its values there."""

  steps: np.ndarray
  values: np.ndarray

  @classmethod
  def of(cls, steps: Any, values: Any) -> "Column":
    """The same of any sequences."""
    return cls(np.asarray(steps, np.int64), np.asarray(values, np.float64))


EMPTY = Column.of((), ())


def read_rows(path: Path) -> tuple[dict[str, Column], list[tuple[int, str, str]]]:
  """The metrics of a metrics.jsonl by name, and its texts as (step, name, text).

  Raises:
    ValueError: a line is not a row of metrics; names the line.
  """
  found: dict[str, tuple[array, array]] = {}
  texts: list[tuple[int, str, str]] = []
  rows = (row for _, row in jsonl_rows(path))
  for batch in itertools.batched(rows, BATCH):
    for names, group in itertools.groupby(batch, key=tuple):  # most rows have the same names
      columns = dict(zip(names, zip(*(row.values() for row in group), strict=True), strict=True))
      steps, odd = columns.pop("step"), columns.pop("nonfinite", None)
      for name, given in columns.items():
        values: Sequence[Any] = given
        if odd is not None:
          values = [
            float(of[name]) if value is None and name in of else value
            for value, of in zip(given, odd, strict=True)
          ]
        own = steps
        try:
          numbers = array("d", list(values))
        except TypeError:  # there are texts among them
          both = list(zip(steps, values, strict=True))
          texts += [(step, name, value) for step, value in both if isinstance(value, str)]
          both = [each for each in both if isinstance(each[1], int | float)]
          own, numbers = [step for step, _ in both], array("d", [value for _, value in both])
        if numbers:
          known = found.setdefault(name, (array("q"), array("d")))
          known[0].extend(own)
          known[1].extend(numbers)
  return {name: Column.of(*column) for name, column in found.items()}, texts
