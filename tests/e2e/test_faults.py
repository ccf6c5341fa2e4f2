"""`python -m lab.faults`: the smoke suite with the production step and supervisor."""

import functools
import os
import site

import pytest
from commands import forked
from xla_flags import FAST_STEPS

from lab.faults.results import Results
from lab.faults.scenarios import SCENARIOS
from lab.faults.suite import SMOKE, SUITES

pytestmark = pytest.mark.slow
HEALTHY = [name for name in SMOKE if SCENARIOS[name].kind == "healthy"]


def faults(*flags, prepare=None, **env):
  result = forked("lab.faults", *flags, prepare=prepare, XLA_FLAGS=FAST_STEPS, **env)
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


@pytest.mark.parametrize("fault", [name for name in SMOKE if name not in HEALTHY])
def test_a_fault_costs_no_more_under_guard(runs, fault):
  clean = runs["clip", "clean"]["loss"]
  guarded, clipped = (runs[arm, fault]["loss"] - clean for arm in ("ours", "clip"))
  assert guarded < clipped + 0.02
  if fault.startswith("nan"):
    assert not runs["clip", fault]["finite"] and guarded < 0.25


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(runs, name):
  guarded = runs["ours", name]
  assert not guarded["fired"] and guarded["weights"] == runs["clip", name]["weights"]


def test_it_goes_on_where_it_was_killed(smoke, runs, tmp_path):
  lines = smoke[0].read_text().splitlines()
  clean, burst = (next(x for x in lines if f'"clip", "scenario": "{s}"' in x)
                  for s in ("clean", "computed_x30_burst"))  # fmt: skip
  path = tmp_path / "faults.jsonl"
  path.write_text(f"{clean}\n{burst[:-30]}")
  faults("run", "--arms=clip", "--faults=clean,computed_*", f"--results={path}")
  assert path.read_text().splitlines()[0] == clean
  timeless = lambda record: {k: v for k, v in record.items() if k != "secs"}
  again = {key[:2]: record for key, record in Results(path).records.items()}
  assert again.keys() == {("clip", "clean"), ("clip", "computed_x30_burst")}
  for key, record in again.items():
    assert timeless(record) == timeless(runs[key])


def test_a_guard_of_somebody_else_over_two_processes(tmp_path):
  (tmp_path / "my_guards.py").write_text(
    "class Idle:\n"
    "  def observe(self, step, metrics, probe):\n"
    "    assert (probe is None) == (step % 10 > 0)\n"
    "  def decide(self):\n"
    "    return 'continue'\n"
  )
  path = tmp_path / "faults.jsonl"
  env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
  flags = ["--arms=clip", "--guard=my_guards:Idle", "--faults=clean", "--processes=2"]
  prepare = functools.partial(site.addsitedir, str(tmp_path))  # that process has begun long ago
  text = faults("run", *flags, f"--results={path}", prepare=prepare, **env)
  assert "my_guards:Idle" in text
  weights = {record["weights"] for record in Results(path).records.values()}
  assert len(Results(path).records) == 2 and len(weights) == 1


def test_the_table_is_printed_again(smoke):
  path, printed = smoke
  assert faults("table", f"--results={path}") == printed
  assert all(f"| {name} " in printed for name in SMOKE if name not in HEALTHY)


def test_wrong_flags():
  for flags, error in (
    (["run"], "--results is missing"),
    (["run", "--results=x", "--arms=clap"], "--arms=clap is unknown to --suite=smoke"),
    (["run", "--results=x", "--faults=flood"], "Choose of: nan_weight"),
    (["run", "--results=x", "--suite=held_out", "--seeds=0"], "--seeds=0 is unknown to"),
    (["run", "--results=x", "--guard=nowhere:Guard"], "--guard=nowhere:Guard is no class"),
    (["table", "--results=/nowhere/x"], "--results holds no runs"),
  ):
    assert error in forked("lab.faults", *flags, XLA_FLAGS=FAST_STEPS).error()
