"""Runs -> figures -> text.

Recovered = (L_none - L) / (L_none - L_clean) with final validation losses L of one seed: 1 = as if
nothing had happened, 0 = as bad as nothing done. L_none is of the unguarded run with the fault,
L_clean of the clipped run without. Not given where the fault cost less than `LEAST_DAMAGE`.
Excess = L - L_clean in nats. Intervals: 95 %, bootstrap over seeds, alike for all arms (paired).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lab.faults.arms import ARMS, OTHER_ARMS
from lab.faults.audit import KNOWN
from lab.faults.results import Record
from lab.faults.thresholds import THRESHOLDS, Threshold

UNGUARDED, USUAL, CLEAN = "none", "clip", "clean"
BASELINES = ("clip", "zclip", "adagc", "skip_step", "rate_rules")
LEAST_DAMAGE = 0.02  # nats
RESAMPLES = 2000


class Board:
  """Final losses and reactions as arrays [arm, scenario, seed]; NaN where there is no run.

  Attributes:
    arms: names, in the order of `ARMS` and `OTHER_ARMS`.
    found: all scenarios that were run.
    faults: those that are faults.
    controls: those that are not.
    seeds: sorted.
    records: by arm, scenario, seed.
  """

  def __init__(self, records: Sequence[Record]):
    self.records = {(r["arm"], r["scenario"], r["seed"]): r for r in records}
    found = {arm for arm, _, _ in self.records}
    self.arms = [arm for arm in (*ARMS, *OTHER_ARMS) if arm in found]
    ran = {scenario for _, scenario, _ in self.records}
    self.found = [s for s in KNOWN if s in ran]
    self.faults = [s for s in self.found if not KNOWN[s].is_control]
    self.controls = [s for s in self.found if KNOWN[s].is_control]
    self.seeds = sorted({seed for _, _, seed in self.records})
    rng = np.random.default_rng(0)
    self._resamples = rng.integers(0, len(self.seeds), (RESAMPLES, len(self.seeds)))

  def values(self, name: str, arm: str, scenario: str) -> np.ndarray:
    """A field of the runs of an arm by seed; NaN where it is missing."""
    found = [self.records.get((arm, scenario, seed), {}).get(name) for seed in self.seeds]
    return np.array([np.nan if x is None else x for x in found], np.float64)

  def excess(self, arm: str, scenario: str) -> np.ndarray:
    """By seed; a control against the clipped run of the same control."""
    usual = scenario if KNOWN[scenario].is_control else CLEAN
    return self.values("loss", arm, scenario) - self.values("loss", USUAL, usual)

  def recovered(self, arm: str, scenario: str) -> np.ndarray:
    """By seed."""
    unguarded = self.values("loss", UNGUARDED, scenario)
    damage = unguarded - self.values("loss", USUAL, CLEAN)
    damage = np.where(damage > LEAST_DAMAGE, damage, np.nan)
    return (unguarded - self.values("loss", arm, scenario)) / damage

  def interval(self, by_seed: np.ndarray) -> tuple[float, float]:
    """Of the mean of [scenario, seed] under resampled seeds; NaN where there is no run."""
    by_sample = _mean(by_seed[:, self._resamples])
    means = _mean(by_sample.T)
    if not np.isfinite(means).any():
      return np.nan, np.nan
    low, high = np.nanquantile(means, [0.025, 0.975])
    return float(low), float(high)

  def all_recovered(self, arm: str) -> np.ndarray:
    """[fault, seed]."""
    return np.array([self.recovered(arm, fault) for fault in self.faults])

  def diagnosed(self, arm: str, scenario: str) -> np.ndarray:
    """By seed: 1 if the first finding from the onset on names the cause; NaN without one."""
    cause, right = KNOWN[scenario].cause, []
    for seed in self.seeds:
      record = self.records.get((arm, scenario, seed), {})
      found = [c for step, c, _ in record.get("findings", ()) if step > record["onset"]]
      right.append(float(found[0] == cause) if found and cause else np.nan)
    return np.array(right)

  def remedies(self, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """The interventions of all runs of an arm, controls too.

    Returns:
      How sure the supervisor was of each; and 1 where it was right: the fault was there, of that
      cause, and no verdict says that the action did no good.
    """
    sure, right = [], []
    for (of, scenario, _), record in self.records.items():
      verdicts = dict(record.get("verdicts", ()))
      for step, number, cause, confidence, _ in record.get("decisions", ()) if of == arm else ():
        if cause not in ("harm", "recovery"):
          planted = cause == KNOWN[scenario].cause and step > record["onset"]
          sure.append(confidence)
          right.append(planted and verdicts.get(number, "unclear") in ("helped", "unclear"))
    return np.array(sure), np.array(right, np.float64)


def calibration_error(sure: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
  """Expected calibration error (Guo et al. 2017, eq. 3): how far confidence is from its hit rate.

  Args:
    sure: stated probabilities, [n].
    right: 1 where it came true, [n].
    bins: equally wide, of probabilities.

  Returns:
    The mean over the bins of |mean of sure - mean of right|, by the number in each; NaN of none.
  """
  at = np.minimum((sure * bins).astype(int), bins - 1)
  gaps = [abs(np.sum(sure[at == i] - right[at == i])) for i in range(bins)]
  return sum(gaps) / sure.size if sure.size else np.nan


def mean(by_seed: np.ndarray) -> float:
  """Of [scenario, seed]: over seeds, then over scenarios, of what is not NaN; NaN of nothing."""
  return float(_mean(_mean(by_seed)))


def _mean(x: np.ndarray) -> np.ndarray:
  """Over the last axis, of what is not NaN; NaN of nothing."""
  seen = np.isfinite(x)
  total = np.sum(np.where(seen, x, 0.0), axis=-1)
  return np.where(seen.any(axis=-1), total / np.maximum(seen.sum(axis=-1), 1), np.nan)


def figures(board: Board, arm: str) -> dict[str, float]:
  """The figures of `THRESHOLDS` for an arm; NaN where runs are missing."""
  ours = board.all_recovered(arm)
  baselines = {b: board.all_recovered(b) for b in BASELINES if b in board.arms and b != arm}
  nothing = np.full_like(ours, np.nan)
  best = max(baselines.values(), key=mean, default=nothing)
  gaps = np.array([_mean(b - ours) for b in baselines.values()] or [_mean(nothing)])
  excess = np.array([board.excess(arm, fault) for fault in board.faults])
  right = np.concatenate([board.diagnosed(arm, f) for f in board.faults])
  of_clean = lambda name: board.values(name, arm, CLEAN)
  sure, hit = board.remedies(arm)
  undone = sum(r.get("undone", 0) for (of, _, _), r in board.records.items() if of == arm)
  lasting = [board.values("rollbacks", arm, c) + board.values("cuts", arm, c)
             for c in board.controls]  # fmt: skip
  return dict(zip(THRESHOLDS, (
    mean(ours),
    mean(ours) - mean(best),
    _least(_mean(ours)),
    -_least(-gaps),
    mean(excess),
    -_least(-excess),
    float(_mean(right)),
    undone / sure.size if sure.size else np.nan,
    calibration_error(sure, hit),
    abs(mean(board.excess(arm, CLEAN)[None])),
    float(_mean(of_clean("skipped") / of_clean("steps"))),
    float(np.nansum(lasting)),
  ), strict=True))  # fmt: skip


def _least(x: np.ndarray) -> float:
  return float(np.min(x, initial=np.inf, where=np.isfinite(x)))


def render(records: Sequence[Record], judged: str) -> str:
  """All tables as Markdown.

  Args:
    records: runs.
    judged: the arm that the thresholds are for.
  """
  board = Board(records)
  tables = [f"{len(records)} runs, seeds {', '.join(map(str, board.seeds))}."]
  if board.faults:
    tables += [
      _table("recovered, mean [95 %]", board, board.faults, _recovered, overall=_overall),
      _table("excess, nats: mean / worst", board, board.faults, _excess),
      _table("diagnosis: right / with one", board, board.faults, _diagnosis),
      _table("steps until it acted: median (runs without any)", board, board.faults, _delay),
    ]
  if board.controls:
    tables += [
      _table("controls: loss against clip, nats", board, board.controls, _excess),
      _table("controls: steps acted on / left out, per 1000", board, board.controls, _false),
    ]
  if judged in board.arms and board.faults:
    tables.append(verdict(judged, figures(board, judged), THRESHOLDS))
  return "\n\n".join(tables)


Cell = Callable[[Board, str, str], str]


def _table(
  title: str,
  board: Board,
  scenarios: list[str],
  cell: Cell,
  overall: Callable[[Board, str], str] | None = None,
) -> str:
  rows = [[s, *(cell(board, arm, s) for arm in board.arms)] for s in scenarios]
  if overall is not None:
    rows.append(["**mean**", *(overall(board, arm) for arm in board.arms)])
  return markdown([title, *board.arms], rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
  """A table."""
  widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
  line = lambda row: "| " + " | ".join(f"{x:<{w}}" for x, w in zip(row, widths, strict=True)) + " |"
  return "\n".join([line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|",
                    *map(line, rows)])  # fmt: skip


def number(x: float, digits: int = 2) -> str:
  """A figure; "-" of NaN."""
  return f"{x:.{digits}f}" if np.isfinite(x) else "-"


def _with_interval(board: Board, by_seed: np.ndarray) -> str:
  low, high = board.interval(by_seed)
  middle = number(mean(by_seed))
  return middle if middle == "-" else f"{middle} [{number(low)}, {number(high)}]"


def _recovered(board: Board, arm: str, scenario: str) -> str:
  return _with_interval(board, board.recovered(arm, scenario)[None])


def _overall(board: Board, arm: str) -> str:
  return _with_interval(board, board.all_recovered(arm))


def _excess(board: Board, arm: str, scenario: str) -> str:
  excess = board.excess(arm, scenario)
  return f"{number(mean(excess[None]), 3)} / {number(-_least(-excess), 3)}"


def _delay(board: Board, arm: str, scenario: str) -> str:
  ran = np.isfinite(board.values("acted", arm, scenario))
  delays = board.values("delay", arm, scenario)[ran]
  if not ran.any():
    return "-"
  silent = int(np.isnan(delays).sum())
  median = "-" if silent == delays.size else f"{np.nanmedian(delays):.0f}"
  return f"{median} ({silent})"


def _diagnosis(board: Board, arm: str, scenario: str) -> str:
  right = board.diagnosed(arm, scenario)
  return f"{np.nansum(right):.0f} / {np.isfinite(right).sum()}"


def _false(board: Board, arm: str, scenario: str) -> str:
  steps = board.values("steps", arm, scenario)
  rate = lambda name: float(_mean(1000.0 * board.values(name, arm, scenario) / steps))
  return f"{number(rate('acted'), 1)} / {number(rate('skipped'), 1)}"


def verdict(arm: str, found: Mapping[str, float], thresholds: Mapping[str, Threshold]) -> str:
  """The table of what an arm reached of what is claimed of it."""
  rows = []
  for name, value in found.items():
    wanted = thresholds[name]
    reaches = lambda x, up=wanted.more_is_better, v=value: v >= x if up else v <= x
    word = "missed"
    if not np.isfinite(value):
      word = "no runs"
    elif reaches(wanted.goal):
      word = "goal"
    elif wanted.must is not None and reaches(wanted.must):
      word = "must"
    must = "-" if wanted.must is None else f"{wanted.must:g}"
    rows.append([name, number(value, 4), must, f"{wanted.goal:g}", word])
  return markdown([arm, "figure", "must", "goal", "reached"], rows)
