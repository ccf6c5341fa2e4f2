"""`python -m lab.faults --suite=audit_smoke`, spread over processes."""

import pytest
from commands import forked
from xla_flags import FAST_STEPS

from lab.faults.results import Results
from lab.faults.suite import SUITES

pytestmark = [pytest.mark.thorough, pytest.mark.slow]

SMOKE = SUITES["audit_smoke"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
  """The results file, and what was printed."""
  path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
  done = forked("lab.faults", "run", "--suite=audit_smoke", f"--results={path}",
                "--processes=2", XLA_FLAGS=FAST_STEPS)  # fmt: skip
  assert done.code == 0, done.err
  return path, done.out


@pytest.fixture(scope="module")
def runs(smoke):
  """Its records by (arm, scenario)."""
  return {key[:2]: record for key, record in Results(smoke[0]).records.items()}


def test_it_is_complete(smoke, runs):
  assert runs.keys() == {(arm, scenario) for arm in SMOKE.arms for scenario in SMOKE.scenarios}
  assert not [path for path in smoke[0].parent.iterdir() if path.suffix.startswith(".part")]
  for record in runs.values():
    assert record["corpus"] and record["python"] and record["jax"] and record["protocol"]


def test_a_healthy_run_has_the_weights_of_one_that_nobody_watches(runs):
  clean = runs["ours", "clean"]
  assert clean["acted"] == 0 and not clean["decisions"] and clean["looks"] >= 12
  assert clean["weights"] == runs["clip", "clean"]["weights"]


def test_what_happened(runs):
  clip = runs["clip", "minority_batch_10"]
  assert clip["domains"].keys() == {"main", "script"} == clip["tokens"].keys()
  bit = runs["clip", "flip_weight_b30"]
  assert bit["stops"] and bit["hit"][0].startswith("model/") and bit["finite"]
  assert not runs["ours", "flip_weight_b30"]["stops"]
  assert runs["clip", "schedule_x30_burst"]["loss"] > runs["clip", "clean"]["loss"] + 0.1


def test_the_tables(smoke):
  for title in ("1. a legitimate minority", "2. one bit", "3. the schedule's rate", "4. controls"):
    assert f"| {title}" in smoke[1]
  assert "1. a minority: finite tokens left out" in smoke[1]
