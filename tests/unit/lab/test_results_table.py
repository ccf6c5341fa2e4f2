"""Results on disk survive a kill; the table's figures on runs made up by hand."""

import pytest

from lab.faults.results import Results, mend
from lab.faults.table import Board, figures, tables
from lab.faults.thresholds import AWAY, THRESHOLDS, THRESHOLDS_ON_GPU


def record(arm, scenario, seed, loss, **more):
  usual = {"domains": {"main": loss}, "steps": 100, "left_out": 0, "rate_held": 0, "actions": [],
           "looks": 0, "findings": [], "fired": False, "weights": "w", "stops": []}  # fmt: skip
  return {"arm": arm, "scenario": scenario, "seed": seed, "loss": loss, **usual, **more}


def test_a_run_that_was_being_written_is_forgotten(tmp_path):
  path = tmp_path / "faults.jsonl"
  results = Results(path, "p1")
  for seed in range(3):
    results.add(record("clip", "clean", seed, 2.0))
  whole = path.read_text()
  path.write_text(whole[:-20])
  assert len(Results(path).records) == 2
  assert path.read_text() == whole[:-20]  # only reading changes nothing
  mend(path)
  again = Results(path, "p1")
  assert [seed for _, _, seed in again.records] == [0, 1]
  again.add(record("clip", "clean", 2, 2.0))
  assert path.read_text() == whole
  with pytest.raises(ValueError, match="under protocol p1, now it is p2"):
    Results(path, "p2")


def runs(seeds=(0, 1), **ours):
  """Of each seed. NaN costs `clip` 1 nat, noise 0.1; another guard helps with the first only."""
  made = []
  for seed in seeds:
    made += [
      record("clip", "clean", seed, 2.0),
      record("clip", "nan_gradient", seed, 3.0),
      record("clip", "garbage_rows", seed, 2.1),
      record("clip", "rows_doubled", seed, 1.9, weights="v"),
      record("rewind", "clean", seed, 2.01, left_out=1, fired=True),
      record("rewind", "nan_gradient", seed, 2.21),
      record("rewind", "garbage_rows", seed, 2.12),
      record("restart", "nan_gradient", seed, 2.5),
      record("ours", "clean", seed, 2.0, looks=50),
      record("ours", "nan_gradient", seed, 2.1, fired=True),
      record("ours", "garbage_rows", seed, 2.105),
      record("ours", "rows_doubled", seed, **{"loss": 1.9, "looks": 50, "weights": "v", **ours}),
    ]
  return made


MET = [0, 0, 0, 0, 0, 0.1 / 0.21, 0.005, 0.005]


def reached(**ours):
  board = Board(runs(**ours))
  found = figures(board, board.mendable())
  return [found[name] for name in THRESHOLDS]


def test_figures():
  board = Board(runs())
  assert board.arms == ["clip", "rewind", "restart", "ours"]
  assert board.faults == ["nan_gradient", "garbage_rows"] and board.mendable() == ["nan_gradient"]
  assert [board.best(s) for s in board.faults] == ["rewind", "clip"]
  assert reached() == pytest.approx(MET, abs=1e-9)


@pytest.mark.parametrize(
  ("what", "place", "value"),
  [
    ({"actions": [[9, "rollback", 5]], "fired": True, "domains": {"main": 1.911}}, 0, 2),
    ({"actions": [[9, "rollback", 5]], "fired": True, "domains": {"main": 1.909}}, 0, 0),
    ({"actions": [[9, "rate", 0.5]], "fired": True}, 1, 2),
    ({"actions": [[9, "rate", 2.0]], "fired": True}, 1, 0),
    ({"rate_held": 1, "fired": True}, 1, 2),
    ({"left_out": 1, "fired": True}, 2, 0.5),
    ({"findings": [[9, "odd"]]}, 3, 1.0),
    ({"weights": "other"}, 4, 2),
    ({"weights": "other", "fired": True}, 4, 0),
  ],
)
def test_what_is_no_good_in_a_healthy_run(what, place, value):
  expected = list(MET)
  expected[place] = value
  assert reached(**what) == pytest.approx(expected, abs=1e-9)


def test_faults_that_can_be_mended_are_chosen_on_the_tuning_seeds():
  held_out = runs((100,))
  for run in held_out:  # there nobody mends anything
    run["loss"] = 2.0 if run["scenario"] == "clean" else 3.0
  lines = tables(runs() + held_out).splitlines()
  (row,) = [line for line in lines if line.startswith("| nan_gradient | yes ")]
  assert row == "| nan_gradient | yes | clip | 1.000 | 1.000 | 1.000 |"
  assert "12 runs, seeds 100." in lines
  (verdict,) = [line for line in lines if line.startswith("| faults that can be mended")]
  assert verdict.endswith("| 1.000 | <= 0.5 | missed |")


def test_the_tables():
  scored = record("clip", "nan_gradient", 0, 3.0, spikes={"train/loss": 0.02})
  text = tables([*runs(), scored])
  assert "| nan_gradient | 2.000, - | -, - | -, - | -, - |" in text
  assert "| clean | 0.000 (0.000) | 0.010 (0.010) | - (-) | 0.000 (0.000) |" in text
  assert "| nan_gradient | 1.000 (1.000) | 0.200 (0.200) | - (-) | 0.100 (0.100) |" in text
  assert "| ours | 4 | 0 | 0 | 0 | 0 | 0 of 200 | 0.000 (clean) |" in text
  assert text.count("| met |") == len(THRESHOLDS)


def test_what_is_said_of_the_clean_run_too_sees_no_fault():
  watched = lambda scenario, seed, causes: record(
    "ours-observe", scenario, seed, 2.0, onset=100, causes=causes
  )
  text = tables(
    [
      watched("clean", 0, [[150, "usual"]]),
      watched("lost_updates", 0, [[90, "early"], [110, "usual"], [130, "still"], [140, "late"]]),
      watched("lost_updates", 1, [[120, "usual"]]),
      watched("lost_updates", 2, []),
      watched("same_rows", 0, [[110, "usual"]]),
    ]
  )
  assert "| lost_updates | 2 of 3 | 25.000 | still, usual |" in text.splitlines()
  assert "| same_rows | 0 of 1 | - | - |" in text.splitlines()


def test_long_runs_have_thresholds_of_their_own():
  away = [record("ours", "clean", seed, 2.0 - 0.02 * seed, looks=50) for seed in (0, 1)]
  long = [run | {"steps": 5_000} for run in [*runs(), *away]]
  assert f"| {AWAY} | 0.020 | <= 0.01 | missed |" in tables(long).splitlines()
  assert tables(long).count("| <") == len(THRESHOLDS_ON_GPU)
