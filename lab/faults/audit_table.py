"""What the audit shows, as Markdown: a table a claim, then what was reached of what is claimed.

Over clip: the held-out loss above that of `clip`, same seed; of a control with the same in it, of a
fault without. Over its own: above that of the arm's own clean run. Mean / worst of the seeds.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from lab.faults import thresholds as claims
from lab.faults.audit import KNOWN, PLACES
from lab.faults.results import Record
from lab.faults.table import CLEAN, USUAL, Board, markdown, number, verdict

# Of a float32; of a count, how far it is thrown.
BITS = {"0-22": range(23), "23-29": range(23, 30), "30": range(30, 31), "31": range(31, 32)}
DATA = ("F2", "F3", "F7")
SHOWN = {"A1", "A2", "A3", "N1", "N2", *DATA}  # families that these tables are of
RUNS_SAY = ("corpus", "protocol", "commit", "dirty", "python", "jax")


def audit_tables(records: Sequence[Record], judged: str) -> str:
  """All tables.

  Args:
    records: runs of the audit, of its long clean runs, or of both.
    judged: the arm that the claims are for.
  """
  board = Board(records)
  of = lambda *families: [s for s in board.found if KNOWN[s].family in families]
  parts = [
    f"{len(records)} runs, seeds {', '.join(map(str, board.seeds))}.",
    *(f"{name}: {', '.join(sorted({str(r.get(name)) for r in records}))}" for name in RUNS_SAY),
  ]
  minorities, rates = of("A1"), of("A3")
  controls = [s for s in of("N1", "N2") if s != "long_clean"]
  tables = [
    _rows(board, minorities, "1. a legitimate minority", _MINORITY),
    _rows(board, of(*DATA), "1. noise", _FAULT),
    _bits(board),
    _rows(board, rates, "3. the schedule's rate", _FAULT),
    _rows(board, controls, "4. controls", _CONTROL),
    _rows(board, [s for s in board.found if s == "long_clean"], "4. clean", _LONG),
    verdict(judged, figures(board, judged), claims.AUDITED) if judged in board.arms else "",
  ]
  return "\n\n".join(["\n".join(parts), *filter(None, tables)])


class Runs:
  """The runs of an arm under some scenarios.

  Attributes:
    records: those that there are.
  """

  def __init__(self, board: Board, arm: str, scenarios: Sequence[str]):
    self._board, self._arm, self._scenarios = board, arm, scenarios
    keys = [(arm, scenario, seed) for scenario in scenarios for seed in board.seeds]
    self.records = [board.records[key] for key in keys if key in board.records]

  def over(self, arm: str, scenario: str | None, domain: str = "main") -> np.ndarray:
    """Loss above that of `arm` under `scenario`, None = the same one; of runs that have both."""
    found = []
    for record in self.records:
      other = self._board.records.get((arm, scenario or record["scenario"], record["seed"]))
      if other is not None and domain in record["domains"] and domain in other["domains"]:
        found.append(record["domains"][domain] - other["domains"][domain])
    return np.array(found)

  def over_clip(self, domain: str = "main") -> np.ndarray:
    """Above clip, with the same control in it or without the fault."""
    is_control = all(KNOWN[s].is_control for s in self._scenarios)
    return self.over(USUAL, None if is_control else CLEAN, domain)

  def minority(self) -> np.ndarray:
    """The same on the other domain, whichever it is."""
    return np.concatenate([self.over_clip(name) for name in ("script", "base64")])

  def over_own(self) -> np.ndarray:
    """Above the arm's own clean run."""
    return self.over(self._arm, CLEAN)

  def total(self, name: str) -> int:
    """A count, over all runs."""
    return sum(int(record[name]) for record in self.records)

  def stops(self) -> int:
    """Runs that stopped."""
    return sum(bool(record["stops"]) for record in self.records)

  def left_out(self, *, minority: bool = False) -> float:
    """Share of the finite tokens, of all or of the minority's, per cent."""
    pairs = [
      pair
      for record in self.records
      for domain, pair in record["tokens"].items()
      if not minority or domain != "main"
    ]
    seen, out = np.sum(pairs, axis=0) if pairs else (0, 0)
    return float(100.0 * out / seen) if seen else np.nan

  def undone(self) -> float:
    """Updates that were made and are not in the weights, a run."""
    lost = [
      r["steps"] - r["replayed"] - r.get("skipped", 0) - r["updates"]
      for r in self.records
      if r["updates"] is not None and not r["stops"] and 0 < r["updates"] <= r["steps"]
    ]
    return float(np.mean(lost)) if lost else np.nan

  def named(self) -> tuple[int, int]:
    """Of runs with a tensor hit in which something was done, or found in the state: named; all."""
    found = [
      r for r in self.records if r["decisions"] or any(f[1] == "state" for f in r["findings"])
    ]
    return sum(_is_named(record) for record in found), len(found)

  def quiet(self) -> tuple[int, int]:
    """Runs in which nothing was done, and how many of them have not the weights of clip's."""
    quiet = wrong = 0
    for record in self.records:
      other = self._board.records.get((USUAL, record["scenario"], record["seed"]))
      fired = record.get("acted") or record["decisions"] or record["replayed"] or record["stops"]
      if other is not None and not fired:
        quiet, wrong = quiet + 1, wrong + (record["weights"] != other["weights"])
    return quiet, wrong

  def bound(self) -> float:
    """The most that actions a look may be, 95 %, where there was none; NaN if there was one."""
    looks = self.total("looks")
    return 1.0 - 0.05 ** (1.0 / looks) if looks and not self.total("looks_acted") else np.nan


def _is_named(record: Record) -> bool:
  """Whether anything that was said names the tensor that was hit, whatever the tree it is in."""
  names = [re.sub(r"^.*?\b(model|mu|nu)/", "", name) for name in record["hit"]]
  names += ["count of updates" for name in record["hit"] if name.endswith("steps")]
  return any(name in text for name in names for text in record["said"])


Cells = dict[str, Callable[[Runs], str]]


def two(x: np.ndarray) -> str:
  """Mean / worst."""
  return f"{number(float(np.mean(x)), 3)} / {number(float(np.max(x)), 3)}" if x.size else "-"


_COUNTS = {
  "rollbacks": lambda runs: str(runs.total("rollbacks")),
  "cuts": lambda runs: str(runs.total("cuts")),
  "runs stopped": lambda runs: f"{runs.stops()} of {len(runs.records)}",
}
_MINORITY = {
  "main over clip": lambda runs: two(runs.over_clip()),
  "minority over clip": lambda runs: two(runs.minority()),
  "left out, %": lambda runs: number(runs.left_out(), 3),
  "of the minority, %": lambda runs: number(runs.left_out(minority=True), 2),
  **_COUNTS,
}
_FAULT = {
  "over clip": lambda runs: two(runs.over_clip()),
  "over its own": lambda runs: two(runs.over_own()),
  "over clip with the same": lambda runs: two(runs.over(USUAL, None)),
  "left out, %": lambda runs: number(runs.left_out(), 3),
  "updates undone": lambda runs: number(runs.undone(), 1),
  **_COUNTS,
}
_CONTROL = {
  "over clip": lambda runs: two(runs.over_clip()),
  "over its own": lambda runs: two(runs.over_own()),
  "left out, %": lambda runs: number(runs.left_out(), 3),
  **_COUNTS,
  "quiet; of them not as clip": lambda runs: "{}; {}".format(*runs.quiet()),
}
_LONG = {
  "over clip": lambda runs: two(runs.over_clip()),
  "left out, %": lambda runs: number(runs.left_out(), 3),
  "quiet; of them not as clip": lambda runs: "{}; {}".format(*runs.quiet()),
  "looks": lambda runs: str(runs.total("looks")),
  "looks with an action": lambda runs: str(runs.total("looks_acted")),
  "at most, a look, 95 %": lambda runs: number(runs.bound(), 5),
}
_BIT = {
  "over clip": lambda runs: two(runs.over_clip()),
  "over its own": lambda runs: two(runs.over_own()),
  "over clip with the same": lambda runs: two(runs.over(USUAL, None)),
  "named / found": lambda runs: "{} / {}".format(*runs.named()),
  **_COUNTS,
}


def _rows(board: Board, scenarios: list[str], title: str, cells: Cells) -> str:
  groups = {scenario: [scenario] for scenario in scenarios}
  return _grouped(board, groups, title, cells)


def _bits(board: Board) -> str:
  groups = {
    f"{place}, {name}": [f"flip_{place}_b{bit}" for bit in bits]
    for place in PLACES
    for name, bits in BITS.items()
  }
  return _grouped(board, groups, "2. one bit", _BIT)


def _grouped(board: Board, groups: dict[str, list[str]], title: str, cells: Cells) -> str:
  """A row for each group of scenarios and arm that has runs; "" without any."""
  rows = []
  for name, scenarios in groups.items():
    for arm in board.arms:
      runs = Runs(board, arm, scenarios)
      if runs.records:
        rows.append([name, arm, *(cell(runs) for cell in cells.values())])
  return markdown([title, "arm", *cells], rows) if rows else ""


def figures(board: Board, arm: str) -> dict[str, float]:
  """The figures of `thresholds.AUDITED` for an arm; NaN where runs are missing."""
  of = lambda *families: [s for s in board.found if KNOWN[s].family in families]
  each = lambda scenarios: [Runs(board, arm, [s]) for s in scenarios]
  minorities, noise, flips = each(of("A1")), each(of(*DATA)), each(of("A2"))
  controls = Runs(board, arm, of("N1", "N2"))
  long = Runs(board, arm, ["long_clean"])
  worst = lambda arrays: _most([x for array in arrays for x in array])
  mean = lambda name: _most([float(np.mean(x)) for x in [Runs(board, arm, [name]).over_clip()]
                             if x.size])  # fmt: skip
  domains = [x for runs in minorities for x in (runs.over_clip(), runs.minority())]
  named = np.sum([runs.named() for runs in flips], axis=0) if flips else (0, 0)
  actions = [runs.total("rollbacks") + runs.total("cuts") for runs in minorities]
  same = [runs.over(USUAL, None) for runs in noise]
  quiet, wrong = controls.quiet()
  return {
    claims.MINORITY_OUT: _most([runs.left_out() for runs in minorities]),
    claims.MINORITY_LOSS: worst(domains),
    claims.MINORITY_ACTIONS: sum(actions) if actions else np.nan,
    claims.NOISE: _most([float(np.mean(x)) for x in same if x.size]),
    claims.BIT: worst(runs.over(USUAL, None) for runs in flips),
    claims.NAMED: named[0] / named[1] if named[1] else np.nan,
    claims.FOR_GOOD: mean("schedule_x30_forever"),
    claims.BURST: mean("schedule_x30_burst"),
    claims.FROM_0: mean("schedule_x30_from_0"),
    claims.EQUAL: wrong if quiet else np.nan,
    claims.LONG: long.total("looks_acted") if long.records else np.nan,
  }


def _most(values: Sequence[float]) -> float:
  return max(values, default=np.nan)
