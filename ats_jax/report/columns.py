"""The metrics of a run as columns: steps and values of each by name."""

import json
import re
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ats_jax.metrics.rows import jsonl_row
from ats_jax.store import paths
from ats_jax.store.paths import Path

BLOCK = 2**20  # bytes that are read at once
_NUMBER = rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"


class Column(NamedTuple):
  """A metric: the steps at which it was written, and its values there."""

  steps: np.ndarray
  values: np.ndarray

  @classmethod
  def of(cls, steps: Any, values: Any) -> "Column":
    """The same of any sequences."""
    return cls(np.asarray(steps, np.int64), np.asarray(values, np.float64))


EMPTY = Column.of((), ())


class _Columns:
  """Metrics as they are read: places of their rows in the file, steps and values."""

  def __init__(self):
    self._tables: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    self._single: dict[str, tuple[array, array, array]] = {}
    self.texts: list[tuple[int, str, str]] = []

  def add_table(self, names: tuple[str, ...], places: np.ndarray, table: np.ndarray) -> None:
    """Add rows of numbers, [names, rows], at `places`."""
    steps = table[names.index("step")].astype(np.int64)
    for name, values in zip(names, table, strict=True):
      if name != "step":
        self._tables.setdefault(name, []).append((places, steps, values))

  def add_row(self, place: int, row: dict[str, Any]) -> bool:
    """Add a row at `place`, and say whether it holds numbers only."""
    step, odd, plain = row.pop("step"), row.pop("nonfinite", {}), True
    for name, value in row.items():
      if isinstance(value, str):
        self.texts.append((step, name, value))
      elif value is not None or name in odd:
        known = self._single.setdefault(name, (array("q"), array("q"), array("d")))
        for values, one in zip(known, (place, step, odd.get(name, value)), strict=True):
          values.append(float(one) if values.typecode == "d" else one)
      plain &= isinstance(value, int | float)
    return plain

  def in_order(self) -> dict[str, Column]:
    """Each metric with its rows in the order of the file."""
    found = {}
    for name in {**self._single, **self._tables}:
      single = [tuple(map(np.asarray, self._single[name]))] if name in self._single else []
      pieces = [*single, *self._tables.get(name, ())]
      places, steps, values = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
      order = np.argsort(places, kind="stable")
      found[name] = Column(steps[order], values[order])
    return found


def _pattern_of(names: tuple[str, ...], wanted: Callable[[str], bool]) -> re.Pattern[bytes]:
  """Finds lines that hold numbers of these names, those of wanted ones in groups."""
  fields = [
    re.escape(json.dumps(name).encode()) + (b": (%b)" if wanted(name) else b": (?:%b)") % _NUMBER
    for name in names
  ]
  return re.compile(rb"^\{" + b", ".join(fields) + rb"\}\n", re.MULTILINE)


def read_rows(
  path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Column], list[tuple[int, str, str]]]:
  """The wanted metrics of a metrics.jsonl by name, and its texts as (step, name, text).

  Most rows hold numbers of the same names in the same order: their lines are found by a pattern
  that is made of one of them, in half the time of a JSON parser. Other lines go through one. A last
  line without its newline is left out.

  Raises:
    ValueError: a line is not a row of metrics; names the line.
  """
  columns, content = _Columns(), paths.read_log(path)
  names, pattern = (), None
  begin = place = 0  # in the file, in bytes and in lines
  while end := content.rfind(b"\n", begin, begin + BLOCK) + 1 or content.find(b"\n", begin) + 1:
    # In front of each line of the pattern is a gap: other lines, usually none.
    pieces = [content[begin:end]] if pattern is None else pattern.split(content[begin:end])
    gaps = pieces[:: len(names) + 1]
    del pieces[:: len(names) + 1]
    behind = place + np.cumsum([gap.count(b"\n") for gap in gaps]) + np.arange(len(gaps))
    if pieces:
      numbers = np.fromiter(map(float, pieces), np.float64, len(pieces))
      columns.add_table(names, behind[:-1], numbers.reshape(-1, len(names)).T)
    others, kinds = 0, {}
    for gap, stop in zip(gaps, behind.tolist(), strict=True):
      lines = gap.split(b"\n")[:-1]
      for at, line in enumerate(lines, stop - len(lines)):
        row = jsonl_row(path, at + 1, line.decode("utf-8", "replace"))
        kind = tuple(row)
        row = {n: v for n, v in row.items() if n in ("step", "nonfinite") or wanted(n)}
        if columns.add_row(at, row):
          kinds[kind] = kinds.get(kind, 0) + 1
      others += len(lines)
    if kinds and others > len(gaps):
      kind = max(kinds, key=lambda kind: kinds[kind])
      needed = lambda name: name == "step" or wanted(name)
      names, pattern = tuple(filter(needed, kind)), _pattern_of(kind, needed)
    begin, place = end, int(behind[-1])
  return columns.in_order(), columns.texts
