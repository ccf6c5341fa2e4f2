"""The smoke suite from end to end, with the production step and supervisor."""

import dataclasses

import pytest

from ats_jax.faults.suite import SMOKE_CONTROLS, SMOKE_FAULTS, SUITES, run_suite

SMOKE = SUITES["smoke"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """The smoke suite's records by (arm, scenario)."""
  results = run_suite(SMOKE, tmp_path_factory.mktemp("smoke") / "faults.jsonl")
  return {(arm, scenario): record for (arm, scenario, _), record in results.records.items()}


def excess(runs, arm, scenario):
  return runs[arm, scenario]["loss"] - runs["clip", "clean"]["loss"]


def test_it_is_complete(runs):
  assert runs.keys() == {(arm, scenario) for arm in SMOKE.arms for scenario in SMOKE.scenarios}


@pytest.mark.parametrize("fault", SMOKE_FAULTS)
def test_a_fault_costs_little_under_guard(runs, fault):
  guarded, clipped = excess(runs, "ours", fault), excess(runs, "clip", fault)
  assert guarded < 0.25 and guarded < clipped
  if fault == "nan_weight":
    assert not runs["clip", fault]["finite"] and runs["ours", fault]["rollbacks"] == 1


def test_a_healthy_run_is_left_alone(runs):
  clean = runs["ours", "clean"]
  assert clean["acted"] == 0 and not clean["decisions"]
  assert clean["loss"] == runs["clip", "clean"]["loss"]


@pytest.mark.parametrize("control", SMOKE_CONTROLS)
def test_what_is_no_fault_is_not_rolled_back(runs, control):
  guarded = runs["ours", control]
  assert guarded["rollbacks"] == guarded["cuts"] == 0 and not guarded["stopped"]


def test_a_suite_goes_on_where_it_was_killed(runs, tmp_path):
  path = tmp_path / "faults.jsonl"
  part = dataclasses.replace(SMOKE, arms=("clip",), scenarios=("clean", "rate_burst"))
  before = run_suite(part, path).records
  path.write_text(path.read_text()[:-30])
  after = run_suite(part, path).records
  assert after.keys() == before.keys()
  clean, burst = ("clip", "clean", 0), ("clip", "rate_burst", 0)
  assert after[clean] == before[clean]  # not run again: it took the same time
  timeless = lambda record: {k: v for k, v in record.items() if k != "secs"}
  # Run again, to the same end; and so it was in another file.
  assert timeless(after[burst]) == timeless(before[burst]) == timeless(runs["clip", "rate_burst"])
