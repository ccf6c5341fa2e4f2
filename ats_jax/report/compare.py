"""Several runs beside each other, at equal steps, tokens, FLOPs or time.

Runs whose settings differ in the seed alone are one group: a line with an interval.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from ats_jax.config.names import differences
from ats_jax.report.columns import Column
from ats_jax.report.facts import device_seconds
from ats_jax.report.figures import Figure, Lines, Series, Table, is_wide, number, series
from ats_jax.report.read import RunRecord

BY = {"steps": "steps", "tokens": "tokens", "flops": "FLOPs", "time": "hours of steps"}
COVERAGE = 0.95  # of intervals over seeds
LAST_SHARE = 0.05  # of the common length: the training loss at its end is a mean over it
SAME_LENGTH = 0.05  # share by which the longest run may be longer, without a word of it
POINTS = 300  # of the line of a group


class Group(NamedTuple):
  """Runs that differ in their seed alone.

  Attributes:
    name: of the group.
    runs: its runs.
  """

  name: str
  runs: tuple[RunRecord, ...]


def groups_of(runs: Sequence[RunRecord]) -> list[Group]:
  """The runs by what they have in common, in order of their first ones."""
  found: list[list[RunRecord]] = []
  for run in runs:
    for group in found:
      if set(differences(group[0].settings, run.settings)) <= {"seed"}:
        group.append(run)
        break
    else:
      found.append([run])
  others = lambda group: f" and {len(group) - 1} other seed{'s' if len(group) > 2 else ''}"
  names = [group[0].name + (others(group) if len(group) > 1 else "") for group in found]
  return [Group(name, tuple(group)) for name, group in zip(names, found, strict=True)]


def place(run: RunRecord, by: str, steps: np.ndarray) -> np.ndarray:
  """Where steps of a run are on the axis of a comparison.

  Raises:
    ValueError: if the run does not say; names another axis.
  """
  if by == "steps":
    return np.asarray(steps, float)
  tokens = run.column("progress/tokens")
  if not len(tokens.steps):
    raise ValueError(f"{run.name} has no progress/tokens in its metrics.jsonl: use --by=steps.")
  at = np.concatenate([[0], tokens.steps])
  total = np.concatenate([[0.0], tokens.values])
  if by != "tokens":
    speed = run.column("train/tokens_per_sec")
    if not len(speed.steps):
      raise ValueError(f"{run.name} has no train/tokens_per_sec yet: use --by=tokens.")
    per_token = 1 / speed.values / 3600
    if by == "flops":
      rate = run.column("train/tflops_per_device")
      known = np.isin(speed.steps, rate.steps)
      if not known.all() or len(rate.steps) != len(speed.steps):
        raise ValueError(f"{run.name} has no train/tflops_per_device in each row: use --by=tokens.")
      per_token = rate.values * 1e12 * run.devices / speed.values
    # A row without a speed, as the first of a start, counts with that of its neighbours.
    total = np.cumsum(np.diff(total, prepend=0.0) * np.interp(at, speed.steps, per_token))
  return np.interp(steps, at, total)


def curve(run: RunRecord, name: str, by: str) -> tuple[np.ndarray, np.ndarray]:
  """A metric over the axis, without values that are not finite."""
  column = run.column(name)
  finite = np.isfinite(column.values)
  x = place(run, by, column.steps[finite])
  return x, column.values[finite]


def interval(values: Sequence[float]) -> tuple[float, float]:
  """The mean, and half the width of its interval by Student's t; NaN of a single value."""
  mean, n = float(np.mean(values)), len(values)
  if n < 2:
    return mean, math.nan
  width = stdtrit(n - 1, 0.5 + COVERAGE / 2) * np.std(values, ddof=1) / math.sqrt(n)
  return mean, float(width)


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
  """The mean of `b` less that of `a`, and half the width of its interval by Welch's test."""
  change = float(np.mean(b) - np.mean(a))
  if min(len(a), len(b)) < 2:
    return change, math.nan
  parts = [np.var(each, ddof=1) / len(each) for each in (a, b)]
  total = float(sum(parts))
  if not total:
    return change, 0.0
  below = sum(part**2 / (len(e) - 1) for part, e in zip(parts, (a, b), strict=True))
  width = stdtrit(total**2 / float(below), 0.5 + COVERAGE / 2) * math.sqrt(total)
  return change, float(width)


def compare(groups: Sequence[Group], by: str, buckets: int) -> tuple[list[str], list[Figure]]:
  """A comparison as sentences and figures.

  Raises:
    ValueError: if a run does not say where its steps are on the axis.
  """
  said, table = at_equal(groups, by)
  figures = [
    _lines(groups, by, buckets, name, title, unit)
    for name, title, unit in (
      ("train/loss", "Training loss", "nats a token"),
      ("eval/loss", "Validation loss", "nats a token"),
      ("train/learning_rate", "Learning rate", ""),
      ("train/grad_norm", "Norm of the gradient", ""),
      ("train/tokens_per_sec", "Speed", "tokens/s"),
    )
  ]
  found = [table, *figures, settings_between(groups)]
  return said, [one for one in found if one is not None]


def at_equal(groups: Sequence[Group], by: str) -> tuple[list[str], Table | None]:
  """The losses of all groups at the end of what they have in common."""
  ends = [[curve(run, "train/loss", by)[0][-1:] for run in group.runs] for group in groups]
  if not all(len(x) for group in ends for x in group):
    return ["A run has no training loss yet, so there is nothing to compare."], None
  end, longest = np.min(ends), np.max(ends)
  amount = lambda value: f"{value:,.4g}" if by in ("flops", "time") else f"{value:,.0f}"
  shown = f"{amount(end)} {BY[by]}"
  train = [[_last(run, by, end) for run in group.runs] for group in groups]
  valid = [[_evaluated(run, by, end) for run in group.runs] for group in groups]
  has_evaluations = all(math.isfinite(value) for values in valid for value in values)
  judged = valid if has_evaluations else train
  word = "validation loss" if has_evaluations else "training loss"
  rows, said = [], []
  for i, group in enumerate(groups):
    hours = sum(device_seconds(run)[0] * run.devices for run in group.runs) / 3600
    against = "" if i == 0 else _interval_text(*difference(judged[0], judged[i]), "+.4f")
    rows.append(
      (group.name, len(group.runs), _interval_text(*interval(train[i])),
       _interval_text(*interval(valid[i])) if has_evaluations else "", against,
       amount(np.mean(ends[i])), f"{hours:,.3g}")
    )  # fmt: skip
    if i:
      change, width = difference(judged[0], judged[i])
      better = "lower" if change < 0 else "higher"
      sure = (
        "without several seeds of both this says nothing about chance"
        if math.isnan(width)
        else f"the {COVERAGE:.0%} interval of the difference {_excludes(change, width)} zero"
      )
      said.append(
        f"At {shown}, the {word} of {group.name} is {abs(change):.4f} {better} than that of "
        f"{groups[0].name}; {sure}."
      )
  if longest > end * (1 + SAME_LENGTH):
    said.append(
      f"The longest run has {amount(longest)} {BY[by]} in all: where it is compared, its learning "
      "rate may not have decayed yet."
    )
  about = (
    f"At {shown}, the most that all runs have reached. Validation losses are interpolated between "
    f"evaluations; training losses are means over the last {LAST_SHARE:.0%} before. With several "
    f"seeds: mean and {COVERAGE:.0%} interval by Student's t; differences by Welch's test."
  )
  columns = ("runs", "#seeds", "#training loss", "#validation loss",
             f"#{word} against the first", f"#{BY[by]} in all", "#device hours")  # fmt: skip
  return said, Table(f"At equal {BY[by]}", about, columns, tuple(rows))


def _excludes(change: float, width: float) -> str:
  return "excludes" if abs(change) > width else "includes"


def _interval_text(mean: float, width: float, form: str = ".4f") -> str:
  return f"{mean:{form}}" if math.isnan(width) else f"{mean:{form}} ± {width:.4f}"


def _last(run: RunRecord, by: str, end: float) -> float:
  """The mean training loss over the last part before `end`."""
  x, values = curve(run, "train/loss", by)
  inside = (x <= end * (1 + 1e-9)) & (x >= end * (1 - LAST_SHARE))
  return float(values[inside].mean()) if inside.any() else float(np.interp(end, x, values))


def _evaluated(run: RunRecord, by: str, end: float) -> float:
  """The validation loss at `end`; NaN if that lies outside of the evaluations.

  Lengths are rounded to steps, so the first evaluation may be a little later.
  """
  x, values = curve(run, "eval/loss", by)
  if not len(x) or x[0] > end * (1 + SAME_LENGTH) or end > x[-1] * (1 + 1e-9):
    return math.nan
  return float(np.interp(end, x, values))


def _lines(
  groups: Sequence[Group], by: str, buckets: int, name: str, title: str, unit: str
) -> Lines | None:
  """A metric of all groups."""
  found = tuple(one for group in groups if (one := _line(group, name, by, buckets)) is not None)
  if not found:
    return None
  has_band = any(one.low for one in found)
  about = f"Over {BY[by]}." + (
    f" Of several seeds: their mean, and its {COVERAGE:.0%} interval." if has_band else ""
  )
  return Lines(title, about, unit, found, x_name=BY[by], log=is_wide(found))


def _line(group: Group, name: str, by: str, buckets: int) -> Series | None:
  """A run as it is; of several seeds the mean and its interval."""
  curves = [curve(run, name, by) for run in group.runs]
  if not all(len(x) for x, _ in curves):
    return None
  marked = name.startswith("eval/")
  if len(curves) == 1:
    (run,) = group.runs
    axis = lambda steps: place(run, by, steps)
    return series(group.name, run.column(name), buckets, axis, marked=marked)
  begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
  first = curves[0][0]
  grid = first[(first >= begin) & (first <= end)]
  if len(grid) > POINTS:
    grid = np.linspace(begin, end, POINTS)
  if not len(grid):
    return None
  values = np.stack([np.interp(grid, x, y) for x, y in curves])
  both = [interval(column) for column in values.T.tolist()]
  mean = np.array([m for m, _ in both])
  whole = series(group.name, Column(grid, mean), len(grid), lambda x: x, marked=marked)
  return whole._replace(
    low=tuple(number(m - width) for m, width in both),
    high=tuple(number(m + width) for m, width in both),
  )


def settings_between(groups: Sequence[Group]) -> Table | None:
  """The settings in which the groups differ from the first."""
  flats: list[Mapping[str, Any]] = [group.runs[0].settings for group in groups]
  changed = [differences(flats[0], flat) for flat in flats[1:]]
  names = sorted({name for one in changed for name in one})
  if not names:
    return None
  rows = []
  for name in names:
    was = next(one[name][0] for one in changed if name in one)
    rows.append(
      (name, str(was), *(str(one[name][1]) if name in one else str(was) for one in changed))
    )
  columns = ("setting", *(group.name for group in groups))
  return Table("Settings that differ between the runs", "Of each group its first run.", columns,
               tuple(rows))  # fmt: skip
