"""`python -m lab.faults`: the smoke suite with the production step and supervisor."""

import pytest
from commands import forked
from xla_flags import FAST_STEPS

from lab.faults.results import Results
from lab.faults.suite import NOISE, SMOKE_CONTROLS, SMOKE_FAULTS, SUITES

pytestmark = pytest.mark.slow


def faults(*flags):
  result = forked("lab.faults", *flags, XLA_FLAGS=FAST_STEPS)
  assert result.code == 0, result.err
  return result.out


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
  """The results file of the smoke suite, and the table that was printed."""
  path = tmp_path_factory.mktemp("smoke") / "faults.jsonl"
  return path, faults("run", "--suite=smoke", f"--results={path}")


@pytest.fixture(scope="module")
def runs(smoke):
  """Its records by (arm, scenario)."""
  return {key[:2]: record for key, record in Results(smoke[0]).records.items()}


def test_it_is_complete(runs):
  suite = SUITES["smoke"]
  assert runs.keys() == {(arm, scenario) for arm in suite.arms for scenario in suite.scenarios}


@pytest.mark.parametrize("fault", SMOKE_FAULTS)
def test_a_fault_costs_little_under_guard(runs, fault):
  clean = runs["clip", "clean"]["loss"]
  guarded, clipped = (runs[arm, fault]["loss"] - clean for arm in ("ours", "clip"))
  if fault in NOISE:  # what is finite is trained on, as the clip does: no worse, and no better
    assert guarded < clipped + 0.02
    record = runs["ours", fault]
    assert record["skipped"] == record["rollbacks"] == record["cuts"] == 0
    return
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


def test_it_goes_on_where_it_was_killed(smoke, runs, tmp_path):
  lines = smoke[0].read_text().splitlines()
  clean, burst = (next(x for x in lines if f'"clip", "scenario": "{s}"' in x)
                  for s in ("clean", "schedule_x30_burst"))  # fmt: skip
  path = tmp_path / "faults.jsonl"
  path.write_text(f"{clean}\n{burst[:-30]}")
  faults("run", "--arms=clip", "--faults=clean,schedule_x30_burst", f"--results={path}")
  assert path.read_text().splitlines()[0] == clean
  timeless = lambda record: {k: v for k, v in record.items() if k != "secs"}
  again = {key[:2]: record for key, record in Results(path).records.items()}
  assert again.keys() == {("clip", "clean"), ("clip", "schedule_x30_burst")}
  assert timeless(again["clip", "schedule_x30_burst"]) == timeless(
    runs["clip", "schedule_x30_burst"]
  )


def test_the_table_is_printed_again(smoke):
  path, printed = smoke
  assert faults("table", f"--results={path}") == printed
  assert "excess, nats" in printed and all(f"| {fault}" in printed for fault in SMOKE_FAULTS)


def test_wrong_flags():
  for flags, error in (
    (["run"], "--results is missing"),
    (["run", "--results=x", "--arms=clap"], "--arms=clap is unknown to --suite=smoke"),
    (["run", "--results=x", "--faults=flood"], "Choose of: rate_burst"),
    (["run", "--results=x", "--suite=full", "--seeds=0"], "--seeds=0 is unknown to --suite=full"),
    (["table", "--results=/nowhere/x"], "/nowhere/x holds no runs"),
  ):
    assert error in forked("lab.faults", *flags, XLA_FLAGS=FAST_STEPS).error()
