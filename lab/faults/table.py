"""Runs -> figures -> Markdown; docs/lab/faults.md says what the figures mean."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from lab.faults.arms import ARMS, OBSERVING, OURS, OWN
from lab.faults.course import SPIKY
from lab.faults.results import Record
from lab.faults.scenarios import CLASSES, SCENARIOS
from lab.faults.suite import TUNING_SEEDS
from lab.faults.thresholds import (
  AWAY,
  HURTS,
  LEAST_GAIN,
  LONG,
  THRESHOLDS,
  THRESHOLDS_ON_GPU,
)

USUAL, CLEAN = "clip", "clean"
RUNS_SAY = ("corpus", "protocol", "commit", "dirty", "python", "jax")


class Board:
  """The runs of some seeds by arm, scenario, seed; scenarios are in the order of their classes."""

  def __init__(self, records: Iterable[Record]):
    self.records = {(r["arm"], r["scenario"], r["seed"]): r for r in records}
    arms, ran, seeds = (set(x) for x in zip(*self.records, strict=True))
    self.arms = [arm for arm in ARMS if arm in arms] + sorted(arms - ARMS.keys())
    self.baselines = [arm for arm in self.arms if arm not in OWN]
    found = [s for kind in CLASSES for s in SCENARIOS if s in ran and SCENARIOS[s].kind == kind]
    self.faults = [s for s in found if SCENARIOS[s].kind != "healthy"]
    self.healthy = [s for s in found if SCENARIOS[s].kind == "healthy"]
    self.seeds = sorted(seeds)

  def runs(self, arm: str, scenarios: Iterable[str]) -> list[Record]:
    """Those that there are."""
    keys = [(arm, scenario, seed) for scenario in scenarios for seed in self.seeds]
    return [self.records[key] for key in keys if key in self.records]

  def over(self, arm: str, scenario: str, other: str) -> list[float]:
    """Losses above those of the clean runs of another arm, of seeds that have both."""
    clean = {run["seed"]: run["loss"] for run in self.runs(other, [CLEAN])}
    runs = self.runs(arm, [scenario])
    return [run["loss"] - clean[run["seed"]] for run in runs if run["seed"] in clean]

  def cost(self, arm: str, scenario: str) -> float:
    """Above the clean run of `clip`, mean of the seeds; NaN without a run."""
    return mean(self.over(arm, scenario, USUAL))

  def usual(self, run: Record) -> Record:
    """The run of `clip` with the same scenario and seed; {} without one."""
    return self.records.get((USUAL, run["scenario"], run["seed"]), {})

  def hurt(self, run: Record) -> float:
    """Of a healthy run, above `clip` with the same change: the domain that lost most."""
    usual = self.usual(run).get("domains", {})
    return max((run["domains"][name] - loss for name, loss in usual.items()), default=np.nan)

  def best(self, scenario: str) -> str:
    """The baseline with the lowest mean cost of a fault."""
    costs = {arm: self.cost(arm, scenario) for arm in self.baselines}
    return min(costs, key=lambda arm: (np.isnan(costs[arm]), costs[arm]), default=USUAL)

  def mendable(self) -> list[str]:
    """Faults that some arm improves by `LEAST_GAIN` over `clip`."""
    gain = lambda s, arm: self.cost(USUAL, s) - self.cost(arm, s)
    return [s for s in self.faults if any(gain(s, arm) >= LEAST_GAIN for arm in self.arms)]


def mean(values: Iterable[float]) -> float:
  """Of what is not NaN; NaN of nothing."""
  found = [x for x in values if np.isfinite(x)]
  return float(np.mean(found)) if found else np.nan


def worst(values: Iterable[float]) -> float:
  """The largest that is not NaN; NaN of nothing."""
  return max((float(x) for x in values if np.isfinite(x)), default=np.nan)


def rollbacks(run: Record) -> int:
  """How many there were."""
  return sum(name == "rollback" for _, name, _ in run["actions"])


def spike_scores(runs: Iterable[Record]) -> str:
  """Of loss and gradient norm, %, means of the runs; records older than the scores have none."""
  scores = [run.get("spikes", {}) for run in runs]
  return ", ".join(number(100.0 * mean(x.get(name, np.nan) for x in scores)) for name in SPIKY)


def is_cut(run: Record) -> bool:
  """Whether the rate was lower than the schedule's for some time."""
  rates = [rate for _, name, rate in run["actions"] if name == "rate"]
  return run["rate_held"] > 0 or any(rate < 1.0 for rate in rates)


def figures(board: Board, mendable: Sequence[str], arm: str = OURS) -> dict[str, float]:
  """The figures of `THRESHOLDS` and `AWAY`; NaN where runs are missing."""
  healthy = board.runs(arm, board.healthy)
  share = lambda part, of: 100.0 * part / of if of else np.nan
  findings = sum(len(r["findings"]) for r in healthy)
  pairs = [(r, board.usual(r)) for r in healthy if not r["fired"]]
  unequal = [r["weights"] != usual["weights"] for r, usual in pairs if usual]
  can = [s for s in mendable if np.isfinite(board.cost(arm, s))]
  of_class = lambda arm: float(np.mean([board.cost(arm, s) for s in can] or [np.nan]))  # all or NaN
  gap = lambda other, s: board.cost(arm, s) - board.cost(other, s)
  found = (
    sum(rollbacks(r) > 0 and board.hurt(r) >= HURTS for r in healthy) if healthy else np.nan,
    sum(map(is_cut, healthy)) if healthy else np.nan,
    share(sum(r["left_out"] for r in healthy), sum(r["steps"] for r in healthy)),
    share(findings, sum(r["looks"] for r in healthy)),
    sum(unequal) if unequal else np.nan,
    of_class(arm) / -worst(-of_class(other) for other in board.baselines),
    worst(gap(USUAL, s) for s in board.faults if s not in mendable),
    worst(gap(board.best(s), s) for s in board.faults),
  )
  away = worst(map(abs, board.over(arm, CLEAN, USUAL)))
  return {**dict(zip(THRESHOLDS, map(float, found), strict=True)), AWAY: away}


def tables(records: Sequence[Record]) -> str:
  """All tables: of the held-out seeds if there are any, else of the tuning seeds."""
  tuned = [r for r in records if r["seed"] in TUNING_SEEDS]
  board = Board([r for r in records if r["seed"] not in TUNING_SEEDS] or tuned)
  mendable = [s for s in Board(tuned or records).mendable() if s in board.faults]
  said = [f"{name}: {', '.join(sorted({str(r.get(name)) for r in records}))}" for name in RUNS_SAY]
  faults = board.faults
  rows = {s: [s] for s in faults}
  rows |= {f"**{kind}**": [s for s in faults if SCENARIOS[s].kind == kind] for kind in CLASSES}
  own = lambda arm, some: _two([board.over(arm, s, arm) for s in some])
  cost = lambda arm, some: _two([board.over(arm, s, USUAL) for s in some])
  spikes = {s: [s] for s in (CLEAN, *faults)}
  score = lambda arm, some: spike_scores(board.runs(arm, some))
  parts = [
    "\n".join([f"{len(board.records)} runs, seeds {', '.join(map(str, board.seeds))}.", *said]),
    _grid(board, "clean run less that of clip, nats: mean (worst)", {CLEAN: [CLEAN]}, cost),
    _grid(board, "over its own clean run, nats: mean (worst)", rows, own),
    _grid(board, "spike score of loss, of gradient norm, %", spikes, score),
    _best(board, mendable),
    markdown(HEALTHY, [_healthy(board, arm) for arm in board.arms]),
  ]
  if seen := _seen(board):
    parts.append(markdown(SEEN, seen))
  if OURS in board.arms:
    is_long = min(r["steps"] for r in records) >= LONG
    claimed = THRESHOLDS_ON_GPU if is_long else THRESHOLDS
    parts.append(_verdict(figures(board, mendable), claimed))
  return "\n\n".join(parts)


def _two(by_scenario: list[list[float]]) -> str:
  most = worst(x for values in by_scenario for x in values)
  return f"{number(mean(map(mean, by_scenario)))} ({number(most)})"


def _grid(
  board: Board, title: str, rows: dict[str, list[str]], cell: Callable[[str, list[str]], str]
) -> str:
  lines = [[name, *(cell(arm, some) for arm in board.arms)] for name, some in rows.items() if some]
  return markdown([title, *board.arms], lines)


def _best(board: Board, mendable: Sequence[str]) -> str:
  rows = []
  for s in board.faults:
    best = board.best(s)
    costs = [number(board.cost(arm, s)) for arm in (USUAL, best, OURS)]
    rows.append([s, "yes" if s in mendable else "no", best, *costs])
  head = ["cost of a fault, nats", "can be mended", "best baseline", USUAL, "best", OURS]
  return markdown(head, rows)


SEEN = ["what is observed", "seen, of runs", "steps from the onset, median", "first by"]


def _seen(board: Board) -> list[list[str]]:
  """When what an observer says of a fault is something that it does not say of the clean run."""
  rows = []
  said = lambda run: [(at, name) for at, name in run.get("causes", ()) if at > run["onset"]]
  for scenario in board.faults:
    runs, first = board.runs(OBSERVING, [scenario]), []
    for run in runs:
      clean = board.records.get((OBSERVING, CLEAN, run["seed"]), {}).get("causes", ())
      usual = {name for _, name in clean}
      first += [(at - run["onset"], name) for at, name in said(run) if name not in usual][:1]
    if runs:
      late = number(float(np.median([at for at, _ in first] or [np.nan])))
      by = ", ".join(sorted({name for _, name in first}))
      rows.append([scenario, f"{len(first)} of {len(runs)}", late, by or "-"])
  return rows


HEALTHY = ["healthy", "runs", "rollbacks", "runs with a lower rate", "steps left out", "stops",
           "looks with a finding", "over clip, worst domain"]  # fmt: skip


def _healthy(board: Board, arm: str) -> list[str]:
  runs = board.runs(arm, board.healthy)
  most = max(runs, key=lambda run: np.nan_to_num(board.hurt(run), nan=-1e9), default=None)
  where = f"{number(board.hurt(most))} ({most['scenario']})" if most is not None else "-"
  counts = [len(runs), sum(map(rollbacks, runs)), sum(map(is_cut, runs)),
            sum(r["left_out"] for r in runs), sum(len(r["stops"]) for r in runs)]  # fmt: skip
  findings = f"{sum(len(r['findings']) for r in runs)} of {sum(r['looks'] for r in runs)}"
  return [arm, *map(str, counts), findings, where]


def _verdict(found: dict[str, float], claimed: Mapping[str, float]) -> str:
  rows = []
  for name, most in claimed.items():
    is_share, value = name.endswith("%"), found[name]
    is_met = value < most if is_share else value <= most
    word = ("met" if is_met else "missed") if np.isfinite(value) else "no runs"
    rows.append([name, number(value), f"{'<' if is_share else '<='} {most:g}", word])
  return markdown([OURS, "figure", "claimed", "verdict"], rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
  """A table."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(x: float) -> str:
  """A figure; "-" of NaN."""
  return f"{x:.3f}" if np.isfinite(x) else "-"
