"""Suites of experts and of low learning rates: small runs of them, and their tables."""

import dataclasses

import jax
import pytest
from helpers import make_test_mesh

from lab.faults.arms import build_arm
from lab.faults.bench import Bench, Suite
from lab.faults.single import run
from lab.faults.suite import EXPERTS, SUITES
from lab.faults.suite_tables import tables

pytestmark = [pytest.mark.thorough, pytest.mark.slow]  # of the laboratory

SMALL = {"model.num_layers": 1, "model.d_model": 32, "model.d_ff": 64, "data.batch_size": 8}
EXACT = 1e-5  # nats per token, float32


@pytest.fixture(scope="module", autouse=True)
def mesh():
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield


def results(bench, name, scenarios, seed, **changes):
  arm = dataclasses.replace(build_arm(name, bench.cfg), **changes)
  return {s: run(bench, arm, s, seed, arm.program.init()) for s in scenarios}


def test_the_suites_of_faults_are_what_they_were():
  assert len(SUITES["full"].arms) == 12 and len(SUITES["full"].scenarios) == 17
  assert SUITES["tune"].arms == SUITES["full"].arms
  assert not set(SUITES["full"].scenarios) & {"dead_experts", "collapsed_router", "low_rate"}


@pytest.fixture(scope="module")
def experts():
  """Records of a guarded run, by scenario."""
  settings = dict(EXPERTS) | SMALL | {"num_steps": 200, "moe.d_ff": 32}
  bench = Bench(Suite((), (), (), tuple(settings.items()), pause_every=20))
  return results(bench, "ours", ("collapsed_router", "biased_router", "dead_experts", "clean"), 0)


def test_a_collapsed_router_is_mended(experts):
  for fault in ("collapsed_router", "biased_router"):
    assert experts[fault]["violation"] > 2.0 and experts[fault]["balanced"] <= 100
  # Weights that something else wrote to are named, and taken back if the held-out loss is worse; a
  # bias is no weight, and moves back.
  record = experts["collapsed_router"]
  assert any("layers/0/mlp/router/offset or its moments" in said for said in record["said"])
  assert {action["action"] for *_, action in record["decisions"]} <= {"Rollback"}
  assert record["rollbacks"] <= 1
  assert not experts["biased_router"]["decisions"]


def test_dead_experts_are_recycled_without_a_change_of_the_loss(experts):
  record = experts["dead_experts"]
  actions = [action["action"] for *_, action in record["decisions"]]
  assert actions and set(actions) <= {"RecycleExpert"} and record["undone"] == 0
  assert len(record["jumps"]) == len(actions)
  assert all(abs(jump) < EXACT for jump in record["jumps"])


def test_healthy_experts_are_left_alone(experts):
  assert not experts["clean"]["decisions"]


def test_steps_that_are_made_again_are_paid_for():
  settings = SMALL | {"num_steps": 180, "optimizer.warmup_steps": 20}
  bench, calls = Bench(Suite((), (), (), tuple(settings.items()))), []
  arm = build_arm("ours+rate", bench.cfg)

  def step(*args):
    calls.append(1)
    return arm.step(*args)

  (record,) = results(bench, "ours+rate", ("low_rate",), 0, step=step).values()
  assert record["replayed"] > 0 and record["replayed"] % 20 == 0
  assert record["decisions"] and all(made[2] == "plateau" for made in record["decisions"])
  assert len(calls) == 180


def row(arm, scenario, seed, loss, **more):
  return {"arm": arm, "scenario": scenario, "seed": seed, "loss": loss, "steps": 100} | more


def test_the_table_of_low_rates():
  tried = {"decisions": [[1]], "replayed": 80}
  quiet = {"decisions": [], "replayed": 0}
  text = tables([
    row("none", "low_rate", 0, 3.0, **quiet),
    row("clip", "clean", 0, 2.0, **quiet),
    row("ours+rate", "low_rate", 0, 2.1, **tried),
    row("ours+rate", "clean", 0, 2.02, **quiet | {"replayed": 40}),
  ], "ours")  # fmt: skip
  assert "| low_rate | 0.00 [0.00, 0.00] | - | 0.90 [0.90, 0.90] |" in text
  assert "| low_rate | 0 / 1; 0 | - | 1 / 1; 80 |" in text
  assert "| clean | - | 0.000 / 0.000 | 0.020 / 0.020 |" in text
  assert "| clean | - | 0 / 1; 0 | 0 / 1; 40 |" in text


def test_the_table_of_experts():
  made = []
  for seed, balanced in enumerate([40, None, 60]):
    more = {"violation": 3.0, "balanced": balanced, "min_load": 0.5 + seed, "rollbacks": 1}
    made.append(row("ours", "collapsed_router", seed, 2.1, **more, jumps=[1e-6, -2e-6]))
    made.append(
      row("ours", "clean", seed, 2.0, **more | {"rollbacks": 0, "balanced": 10}, jumps=[])
    )
  text = tables(made, "ours")
  assert "| collapsed_router | 60 (40 never 60) |" in text
  assert "| collapsed_router | 0.100 / 0.100 |" in text
  assert "| collapsed_router | 0.50 |" in text
  assert "| collapsed_router | 3; 6; 2.0e-06 |" in text and "| clean | 0; 0 |" in text


def test_other_runs_have_the_usual_table():
  text = tables([row("ours", "clean", 0, 2.0), row("clip", "clean", 0, 2.0)], "ours")
  assert "controls: loss against clip" in text


def test_a_fault_that_the_audit_has_not_is_in_the_usual_table():
  made = [row(arm, "clean", 0, 2.0) for arm in ("clip", "ours")]
  made += [row("ours", name, 0, 2.25) for name in ("nan_weight", "schedule_x30_burst")]
  text = tables(made, "ours")
  for name in ("nan_weight", "schedule_x30_burst"):
    assert any(name in line and "0.250 / 0.250" in line for line in text.splitlines())
