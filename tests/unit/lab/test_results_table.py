"""Results on disk survive a kill; the table's figures on runs made up by hand."""

import numpy as np
import pytest

from lab.faults.results import Results
from lab.faults.table import Board, figures, render
from lab.faults.thresholds import THRESHOLDS


def record(arm, scenario, seed, loss, **more):
  return {"arm": arm, "scenario": scenario, "seed": seed, "loss": loss, "steps": 100} | more


def test_a_run_that_was_being_written_is_forgotten(tmp_path):
  path = tmp_path / "runs" / "faults.jsonl"
  results = Results(path, "p1")
  for seed in range(3):
    results.add(record("clip", "clean", seed, 2.0))
  whole = path.read_text()
  path.write_text(whole[:-20])
  assert len(Results(path).records) == 2
  assert path.read_text() == whole[:-20]  # only reading changes nothing
  again = Results(path, "p1")
  assert [seed for _, _, seed in again.records] == [0, 1]
  again.add(record("clip", "clean", 2, 2.0))
  assert path.read_text() == whole
  with pytest.raises(ValueError, match="under protocol p1, now it is p2"):
    Results(path, "p2")


FINDINGS = [
  [[20, "state", 0.9], [40, "data", 0.9], [50, "state", 0.9]],
  [[40, "state", 0.9]],
]
# The cause of noise is "data". Right at 40, too early at 20, undone at 50, wrong cause at 70.
DECISIONS = [
  [20, 0, "data", 0.85, {}],
  [40, 1, "data", 0.85, {}],
  [50, 2, "data", 0.95, {}],
  [60, 3, "harm", 1.0, {}],
  [70, 4, "state", 1.0, {}],
]
REMEDIES = {"decisions": DECISIONS, "verdicts": [[2, "harmed"]], "undone": 1}


def runs(reflex=(2.02, 2.1), skipped=0):
  """Two seeds; without a guard the fault costs 1 nat, with a clip 0.5, with the reflex less."""
  made = []
  for seed, guarded in enumerate(reflex):
    made += [
      record("none", "rate_burst", seed, 3.0),
      record("clip", "clean", seed, 2.0),
      record("clip", "rate_burst", seed, 2.5),
      record("clip", "nan_gradient", seed, 2.9),
      record("none", "nan_gradient", seed, 3.0),
      record("skip_step", "rate_burst", seed, 2.7),
      record("skip_step", "nan_gradient", seed, 2.3),
      record("reflex", "rate_burst", seed, guarded, acted=5, delay=seed),
      record("reflex", "nan_gradient", seed, 2.0, acted=0),
      record(
        "reflex",
        "noise_burst",
        seed,
        2.0,
        onset=30,
        findings=FINDINGS[seed],
        **(REMEDIES if seed == 0 else {}),
      ),
      record("reflex", "clean", seed, 2.0, acted=skipped, skipped=skipped),
    ]
  return made


def test_figures():
  board = Board(runs())
  assert board.faults == ["rate_burst", "noise_burst", "nan_gradient"] and board.controls == [
    "clean"
  ]
  np.testing.assert_allclose(board.recovered("reflex", "rate_burst"), [0.98, 0.9])
  got = figures(board, "reflex")
  assert got.keys() == THRESHOLDS.keys()
  want = {
    "mean recovered": (0.94 + 1.0) / 2,
    # clip recovers 0.5 and 0.1, skip_step 0.3 and 0.7
    "mean recovered, less that of the best baseline": (0.94 + 1.0) / 2 - 0.5,
    "recovered, worst fault": 0.94,
    "most that a fault is below the best baseline": 0.7 - 1.0,
    "mean excess, nats": (0.02 + 0.1) / 2 / 3,
    "max excess, nats": 0.1,
    "diagnosis right, share of runs with one": 0.5,
    "interventions undone, share": 1 / 4,
    # Two between 0.8 and 0.9, one of them right; two above, both wrong.
    "calibration error of the confidence": (2 * 0.35 + 0.95 + 1.0) / 4,
    "clean runs: loss against clip, nats": 0.0,
    "clean runs: steps left out, share": 0.0,
    "controls: rollbacks and rate cuts": 0.0,
  }
  for name, value in want.items():
    assert got[name] == pytest.approx(value, abs=1e-9), name


def test_the_table_says_what_was_reached():
  text = render(runs(skipped=50), "reflex")
  assert "0.94 [0.90, 0.98]" in text
  assert "| 1 (0)" in text or "| 0 (0)" in text  # median delay; no silent run
  lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
  assert lines["mean recovered"].rstrip(" |").endswith("goal")
  assert lines["clean runs: steps left out, share"].rstrip(" |").endswith("missed")
  assert lines["clean runs: steps left out, share"].split("|")[2].strip() == "0.5000"
