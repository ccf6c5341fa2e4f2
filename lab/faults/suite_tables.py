"""What the suites of experts and of low learning rates show, as Markdown; see table.py."""

from collections.abc import Callable, Sequence

import numpy as np

from lab.faults.audit import AUDITED, KNOWN
from lab.faults.audit_table import SHOWN, audit_tables
from lab.faults.results import Record
from lab.faults.table import CLEAN, Board, mean, render

Cell = Callable[[Board, str, str], str]


def tables(records: Sequence[Record], judged: str) -> str:
  """The tables for these runs, whichever suite they are of.

  Args:
    records: runs.
    judged: the arm that the thresholds of the suites of faults are for.
  """
  scenarios = {record["scenario"] for record in records}
  if scenarios & AUDITED.keys() and {KNOWN[name].family for name in scenarios} <= SHOWN:
    return audit_tables(records, judged)
  board = Board(records)
  if "low_rate" in board.faults:
    return _all(board, records, {
      "recovered, mean [95 %]": _recovered,
      "loss over clip without a fault, nats: mean / worst": _excess,
      "rates changed, runs / all; steps made again, mean": _changes,
    })  # fmt: skip
  if any("violation" in record for record in records):
    return _all(board, records, {
      "steps until max violation < 1: median, all": _balanced,
      "loss over the arm's own clean run, nats: mean / worst": _harm,
      "least load at the end over the mean, worst seed": _least,
      "rolled back, runs; recycled, experts; worst change of the loss by it": _surgery,
    })  # fmt: skip
  return render(records, judged)


def _all(board: Board, records: Sequence[Record], cells: dict[str, Cell]) -> str:
  parts = [f"{len(records)} runs, seeds {', '.join(map(str, board.seeds))}."]
  scenarios = [*board.faults, *board.controls]
  for title, cell in cells.items():
    rows = [[s, *(cell(board, arm, s) for arm in board.arms)] for s in scenarios]
    head = [title, *board.arms]
    lines = [head, ["---"] * len(head), *rows]
    parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
  return "\n\n".join(parts)


def _runs(board: Board, arm: str, scenario: str) -> list[Record]:
  found = [board.records.get((arm, scenario, seed)) for seed in board.seeds]
  return [record for record in found if record is not None]


def _two(values: np.ndarray) -> str:
  found = values[np.isfinite(values)]
  return f"{found.mean():.3f} / {found.max():.3f}" if found.size else "-"


def _recovered(board: Board, arm: str, scenario: str) -> str:
  by_seed = board.recovered(arm, scenario)[None]
  if scenario in board.controls or not np.isfinite(by_seed).any():
    return "-"
  low, high = board.interval(by_seed)
  return f"{mean(by_seed):.2f} [{low:.2f}, {high:.2f}]"


def _excess(board: Board, arm: str, scenario: str) -> str:
  return _two(board.excess(arm, scenario))


def _changes(board: Board, arm: str, scenario: str) -> str:
  runs = _runs(board, arm, scenario)
  if not runs:
    return "-"
  changed = sum(bool(run["decisions"]) for run in runs)
  again = np.mean([run["replayed"] for run in runs])
  return f"{changed} / {len(runs)}; {again:.0f}"


def _balanced(board: Board, arm: str, scenario: str) -> str:
  runs = _runs(board, arm, scenario)
  if not runs:
    return "-"
  steps = [np.inf if run["balanced"] is None else run["balanced"] for run in runs]
  word = lambda x: "never" if np.isinf(x) else f"{x:.0f}"
  return f"{word(np.median(steps))} ({' '.join(map(word, steps))})"


def _harm(board: Board, arm: str, scenario: str) -> str:
  return _two(board.values("loss", arm, scenario) - board.values("loss", arm, CLEAN))


def _least(board: Board, arm: str, scenario: str) -> str:
  loads = board.values("min_load", arm, scenario)
  return f"{np.nanmin(loads):.2f}" if np.isfinite(loads).any() else "-"


def _surgery(board: Board, arm: str, scenario: str) -> str:
  runs = _runs(board, arm, scenario)
  jumps = [abs(jump) for run in runs for jump in run["jumps"]]
  back = sum(run["rollbacks"] > 0 for run in runs)
  return f"{back}; {len(jumps)}; {max(jumps):.1e}" if jumps else f"{back}; 0"
