"""Figures as data: lines over steps, maps by layer and step, tables and texts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.report.columns import Column
from ats_jax.report.thin import kept

LOG_RATIO = 50.0  # greatest over median value from which on an axis is logarithmic
Axis = Callable[[np.ndarray], np.ndarray]


class Series(NamedTuple):
  """A line of a figure.

  Attributes:
    name: as the legend has it.
    x: places of its points, increasing.
    y: values; None where one is not finite.
    low: lower ends of an interval about `y`; () = there is none.
    high: upper ends of it.
    marked: whether each point is marked, as it is one of few.
    level: whether it is one value, drawn across the whole plot.
    facts: of all values before any was left out: count, first, last, least, greatest, nonfinite.
  """

  name: str
  x: tuple[float, ...]
  y: tuple[float | None, ...]
  low: tuple[float | None, ...] = ()
  high: tuple[float | None, ...] = ()
  marked: bool = False
  level: bool = False
  facts: Mapping[str, Any] = {}


class Lines(NamedTuple):
  """Lines over steps, or over what runs are compared by.

  Attributes:
    title: of the figure.
    about: what it shows and what to look for.
    unit: of the values.
    series: its lines.
    x_name: what `x` counts.
    log: whether the values are shown on a logarithmic axis.
    events: places in the list of the run's events that are marked.
    phases: (name, first x, last x) of the learning rate.
  """

  title: str
  about: str
  unit: str
  series: tuple[Series, ...]
  x_name: str = "step"
  log: bool = False
  events: tuple[int, ...] = ()
  phases: tuple[tuple[str, float, float], ...] = ()
  kind: str = "lines"


class Heat(NamedTuple):
  """Values by row (a layer, or an expert of one) and column (a step, or an expert).

  Attributes:
    title: of the figure.
    about: what it shows and what to look for.
    unit: of the values.
    x: names of the columns.
    rows: names of the rows.
    values: [rows][x]; None where one is not finite.
    x_name: what the columns are.
  """

  title: str
  about: str
  unit: str
  x: tuple[float, ...]
  rows: tuple[str, ...]
  values: tuple[tuple[float | None, ...], ...]
  x_name: str = "step"
  kind: str = "heat"


class Table(NamedTuple):
  """Rows of texts and numbers.

  Attributes:
    title: of the table.
    about: what it shows.
    columns: their names; one that begins with "#" has numbers.
    rows: cells.
    share: the column whose numbers, between 0 and 1, are shown as bars; "" = none.
  """

  title: str
  about: str
  columns: tuple[str, ...]
  rows: tuple[tuple[Any, ...], ...]
  share: str = ""
  kind: str = "table"


class Texts(NamedTuple):
  """Texts under headings."""

  title: str
  about: str
  texts: tuple[tuple[str, str], ...]
  kind: str = "texts"


Figure = Lines | Heat | Table | Texts


def number(value: float) -> float | None:
  """A value as JSON has it: six digits, None where it is not finite."""
  return float(f"{value:.6g}") if math.isfinite(value) else None


def series(
  name: str, column: Column, buckets: int, axis: Axis | None = None, *, marked: bool = False
) -> Series:
  """A column as a line of few points, with facts of all its points."""
  values = column.values
  x = np.asarray(column.steps if axis is None else axis(column.steps), float)
  finite = np.flatnonzero(np.isfinite(values))
  facts: dict[str, Any] = {"count": len(values), "nonfinite": len(values) - len(finite)}
  if len(finite):
    for word, at in (
      ("first", finite[0]),
      ("last", finite[-1]),
      ("least", finite[values[finite].argmin()]),
      ("greatest", finite[values[finite].argmax()]),
    ):
      facts[word] = (number(float(x[at])), number(float(values[at])))
  places = kept(values, buckets)
  return Series(
    name,
    tuple(float(f"{value:.8g}") for value in x[places].tolist()),
    tuple(map(number, values[places].tolist())),
    marked=marked,
    facts=facts,
  )


def is_wide(found: Sequence[Series]) -> bool:
  """Whether values are all positive and some far above the usual."""
  values = [value for one in found for value in one.y if value is not None]
  return bool(values) and min(values) > 0 and max(values) > LOG_RATIO * float(np.median(values))
