"""Runs beside each other: at equal tokens, FLOPs or time; seeds as intervals."""

import numpy as np
import pytest
from run_folders import end, training, write_run

from ats_jax.report.compare import compare, difference, groups_of, interval, place
from ats_jax.report.read import read_run


def runs(tmp_path, **seeds_by_name):
  """Runs by name, each of some seeds, whose losses differ by what is added."""
  found = []
  for name, (decay, added) in seeds_by_name.items():
    for seed, more in enumerate(added):
      rows = training(range(10, 110, 10), seed=more)
      rows += [{"step": step, "eval/loss": 5.0 - 0.01 * step + more} for step in (0, 50, 100)]
      changes = {"seed": seed, "optimizer.weight_decay": decay}
      folder = write_run(tmp_path / f"{name}{seed}", [*rows, end(100)], changes)
      found.append(read_run(str(folder)))
  return found


def test_intervals_are_those_of_student_and_welch():
  mean, width = interval([1.0, 2.0, 3.0])
  assert mean == 2.0 and width == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)
  assert np.isnan(interval([1.0])[1]) and np.isnan(difference([1.0], [2.0, 3.0])[1])
  change, width = difference([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])  # equal variances: 4 degrees
  assert change == 3.0 and width == pytest.approx(2.7764 * np.sqrt(2 / 3), rel=1e-4)


def test_runs_that_differ_in_their_seed_are_one_line_with_an_interval(tmp_path):
  found = runs(tmp_path, a=(0.1, (0.0, 0.02, 0.04)), b=(0.2, (1.0, 1.02, 1.04)))
  groups = groups_of(found)
  assert [len(group.runs) for group in groups] == [3, 3]
  said, (table, loss, *_, settings) = compare(groups, "tokens", 100)
  assert "1.0000 higher" in said[0] and "excludes zero" in said[0]
  assert table.rows[1][1:5] == (3, "5.0200 ± 0.0497", "5.0200 ± 0.0497", "+1.0000 ± 0.0453")
  line = loss.series[0]
  assert line.x[0] == 640.0 and line.y[0] == pytest.approx(4.92)
  assert line.low[0] < line.y[0] < line.high[0]
  assert settings.rows == (("optimizer.weight_decay", "0.1", "0.2"),)


def test_one_run_of_each_claims_nothing(tmp_path):
  said, _ = compare(groups_of(runs(tmp_path, a=(0.1, (0.0,)), b=(0.2, (1.0,)))), "steps", 100)
  assert "without several seeds of both this says nothing about chance" in said[0]


def test_losses_are_taken_where_the_shorter_run_ends(tmp_path):
  long, short = runs(tmp_path, a=(0.1, (0.0,)), b=(0.2, (0.0,)))
  rows = training(range(10, 60, 10))
  rows += [{"step": 0, "eval/loss": 5.0}, {"step": 50, "eval/loss": 4.5}]
  short = read_run(str(write_run(tmp_path / "short", rows, {"optimizer.weight_decay": 0.2})))
  said, (table, *_) = compare(groups_of([long, short]), "steps", 100)
  assert "At 50 steps" in table.about and "The longest run has 100 steps in all" in said[-1]
  assert [row[-2] for row in table.rows] == ["100", "50"]
  assert [row[3] for row in table.rows] == ["4.5000", "4.5000"]


def test_a_first_evaluation_may_be_later_by_what_rounding_to_steps_costs(tmp_path):
  found = []
  for last, decay in ((100, 0.1), (104, 0.2), (120, 0.3)):
    rows = [*training(range(10, last, 10)), *training([last]), {"step": last, "eval/loss": 4.0}]
    folder = write_run(tmp_path / str(last), rows, {"optimizer.weight_decay": decay})
    found.append(read_run(str(folder)))
  losses = lambda runs: [row[3] for row in compare(groups_of(runs), "steps", 100)[1][0].rows]
  assert losses(found[:2]) == ["4.0000", "4.0000"] and losses(found) == ["", "", ""]


def test_axes(tmp_path):
  (run,) = runs(tmp_path, a=(0.1, (0.0,)))
  steps = np.array([0, 50, 100])
  np.testing.assert_allclose(place(run, "tokens", steps), [0, 3200, 6400])
  np.testing.assert_allclose(place(run, "time", steps), np.array([0, 50, 100]) / 3600)
  np.testing.assert_allclose(place(run, "flops", steps), np.array([0, 50, 100]) * 2e12)
  bare = [{"step": 10, "train/loss": 5.0}]
  bare = read_run(str(write_run(tmp_path / "bare", bare)))
  with pytest.raises(ValueError, match=r"has no progress/tokens .* use --by=steps"):
    place(bare, "tokens", steps)
