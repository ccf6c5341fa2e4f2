"""The probe: what it is made of, when it is read, what follows where it is not."""

import dataclasses
import math

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import counting_rows, make_test_mesh, micro_batches, tiny_config
from readings import EDITED, NAN_STATE, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.signals.probe import FORWARD, Probe
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program
from ats_jax.train.feed import _probe_shape

EVERY, LOOKS = 4, 5  # steps from look to look, looks from reading to reading
SETTINGS = canonical.SUPERVISED | {
  "orchestrator.check_interval": EVERY,
  "orchestrator.snapshot_interval": EVERY,
  "orchestrator.probe_share": FORWARD / EVERY / LOOKS,  # the probe is as large as a batch
}
CFG = canonical.config("dense", SETTINGS)
ROWS = counting_rows(10**6)


@pytest.fixture(scope="module")
def program():
  with jax.set_mesh(canonical.mesh()):
    yield canonical.program(CFG)


class Run:
  """A run of `steps`, and what its ledger says of each look."""

  def __init__(self, program, path, probe=ROWS):
    self.program, self.path, self.step, self.state = program, path, 0, canonical.state(CFG)
    self.supervisor = Supervisor(program, probe, path)
    self.supervisor.start(0, self.state)

  def __call__(self, steps):
    for _ in range(steps):
      self.step += 1
      batch = micro_batches(counting_rows(self.step), 1)
      self.state, self.metrics = self.program.train_step(
        self.state, batch, self.program.training_rules(1)
      )
      self.state = self.supervisor.after(self.step, self.state, self.metrics)
    return self

  def settle(self):
    self.state = self.supervisor.settle(self.step, self.state, self.metrics)

  def looks(self):
    self.supervisor.close()
    return [r["reading"] for r in ledger.read_lines(self.path) if r["kind"] == "check"]


def read_at(looks):
  return [look["step"] for look in looks if not math.isnan(float(look["probe"]))]


@pytest.mark.parametrize(
  ("batch", "accum", "seq", "shards", "parts", "rows"),
  [
    (16, 1, 2048, 8, 1, 64),  # a micro-batch of 128 blocks
    (8, 1, 512, 4, 4, 16),
    (8, 2, 512, 4, 8, 8),
    (8, 1, 16, 1, 8, 8),  # short rows stay whole
    (96, 1, 256, 96, 1, 96),  # a row for each shard
    (24, 1, 256, 24, 3, 24),
  ],
)
def test_a_part_takes_no_more_memory_than_a_batch_of_an_evaluation(
  batch, accum, seq, shards, parts, rows
):
  cfg = tiny_config({"data.batch_size": batch, "step.accum_steps": accum, "data.seq_len": seq})
  assert _probe_shape(cfg, shards) == (parts, rows)
  assert rows % shards == 0 and parts * rows >= 64
  assert rows * min(seq, 256) <= batch // accum * seq


def test_parts_sum_to_the_whole(program):
  state, rules = canonical.state(CFG), program.rules(1)
  whole, parts = Probe(program, ROWS), Probe(program, micro_batches(ROWS, 4))
  score = lambda probe: probe_loss(probe.score(program, state.model, rules))
  assert score(parts) == pytest.approx(score(whole), rel=1e-6)
  assert parts.every == whole.every == LOOKS


@pytest.mark.mesh
def test_parts_lie_on_eight_devices_as_batches_do(program):
  state, rules = canonical.state(CFG), program.rules(1)
  want = probe_loss(Probe(program, ROWS).score(program, state.model, rules))
  mesh = make_test_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    program = make_program(program.cfg)
    probe = Probe(program, to_global(micro_batches(ROWS, 2), mesh))
    sums = probe.score(program, program.init().model, rules)
  assert len(sums) == 2 and probe_loss(sums) == pytest.approx(want, rel=1e-5)


def test_it_costs_no_more_than_it_may(program, tmp_path):
  """And still the candidate waits for it: no state is good by the training loss alone."""
  run = Run(program, tmp_path / "decisions.jsonl")(EVERY * (2 * LOOKS + 2))
  assert read_at(run.looks()) == [EVERY * (1 + LOOKS * n) for n in (0, 1, 2)]
  assert not run.supervisor.decisions
  # The first stays until the first steps are judged, which moved these weights fast.
  assert [s.step for s in run.supervisor._snapshots.good] == [0, EVERY * (LOOKS + 2)]
  assert ledger.replay(run.path) == []


def test_at_a_checkpoint_it_is_always_read(program, tmp_path):
  run = Run(program, tmp_path / "decisions.jsonl")(EVERY * 3)
  run.settle()  # where a look was just begun
  run(EVERY + 1).settle()  # and in the middle of an interval
  assert read_at(run.looks()) == [EVERY, EVERY * 3, EVERY * 4 + 1]


def test_a_spoilt_state_is_rolled_back_at_the_look_after_the_suspicion(program, tmp_path):
  begin = 88  # it is read at 84, and next at 104
  run = Run(program, tmp_path / "decisions.jsonl")(begin)
  spoil = lambda path, x: x * 30.0 if "head" in jax.tree_util.keystr(path) else x
  model = jax.tree_util.tree_map_with_path(spoil, run.state.model)
  run.state = dataclasses.replace(run.state, model=model)
  run(EVERY)
  run(EVERY * 3)
  ((step, decision),) = run.supervisor.decisions
  assert (step, decision.action, decision.cause) == (begin + 3 * EVERY, Rollback(), "state")
  assert begin + 2 * EVERY in read_at(run.looks())
  checks = {r["reading"]["step"]: r for r in ledger.read_lines(run.path) if r["kind"] == "check"}
  first, second = (checks[begin + n * EVERY] for n in (1, 2))
  # Named at once by its checksum; how bad it is the probe says, which is scored for that.
  assert (first["reading"]["wrong"], second["reading"]["wrong"]) == (1, 0)
  assert first["reading"]["tensor"] == "head/weight"
  assert math.isnan(float(first["reading"]["probe"]))
  for check in (first, second):
    assert "head/weight or its moments" in check["health"]["causes"][0]
  assert ledger.replay(run.path) == run.supervisor.decisions


def test_a_resumed_run_reads_it_when_the_other_would_have(program, tmp_path):
  run = Run(program, tmp_path / "decisions.jsonl")(EVERY * 3)
  run.settle()
  saved, state = run.supervisor.saved(), jax.tree.map(jnp.copy, run.state)
  again = Run(program, tmp_path / "again.jsonl")
  again.step, again.state = run.step, state
  again.supervisor.start(run.step, state, saved)
  for one in (run, again):
    one(EVERY * (LOOKS + 2))
  assert read_at(run.looks())[2:] == read_at(again.looks()) == [EVERY * (3 + LOOKS)]


# ---- the policy, where the probe's loss is not known


def look(policy, number, **changes):
  terms = Terms(OrchestratorConfig(mode="act", check_interval=10))
  fields = {"rules": (0, 1.0, 0, 1), **changes}
  policy, judgement = decide(terms, policy, Interval(reading(number, **fields)), number * 10 + 20)
  return policy, judgement


@pytest.mark.parametrize("surprise", [dict(surprising=10, loss=5.0), dict(held=25)])
def test_nothing_is_concluded_from_surprise_alone(surprise):
  policy, _ = look(PolicyState(), 0)
  policy, judgement = look(policy, 1, probe=math.nan, **surprise)
  assert judgement.finding.cause == "unknown" and not judgement.decisions and not judgement.good
  assert policy.odd == 0 and policy.reference == 2.0
  policy, judgement = look(policy, 2, probe=5.0, **surprise)
  assert judgement.finding.cause in ("data", "learning rate") and not judgement.good


def test_the_reference_outlives_looks_without_it():
  policy, _ = look(PolicyState(), 0)
  for number in range(1, 4):
    policy, judgement = look(policy, number, probe=math.nan)
    assert judgement.finding is None
  assert policy.reference == 2.0 and policy.healthy == 4


@pytest.mark.parametrize(
  ("rules", "found"),
  [((0, 1.0, 0, 1), dict(probe=3.0)), ((0, 1.0, 0, 1), NAN_STATE), ((), dict(probe=math.nan))],
)
def test_weights_are_doubted_until_they_are_read_and_no_longer(rules, found):
  """A rollback leaves others; without a probe there is nothing to wait for."""
  policy, _ = look(PolicyState(), 0, rules=rules)
  policy, judgement = look(policy, 1, rules=rules, probe=math.nan, **EDITED)
  assert judgement.finding.cause == "state" and "attn/q" in judgement.finding.reason
  assert bool(policy.doubts) == bool(rules)
  policy, judgement = look(policy, 2, rules=rules, **found)
  assert [d.action for d in judgement.decisions] == ([Rollback()] if rules else [])
  assert not policy.doubts
  _, judgement = look(policy, 5, rules=rules, probe=math.nan if not rules else 2.5)
  assert not judgement.stale and not judgement.decisions
  assert judgement.finding is None or judgement.finding.cause != "state"


def test_without_any_probe_surprise_is_of_the_data_as_ever():
  _, judgement = look(PolicyState(), 0, probe=math.nan, rules=(), surprising=10)
  assert judgement.finding.cause == "data"


@pytest.mark.parametrize(
  "odd",
  [
    dict(nonfinite=1), dict(skipped=1), dict(held=1), dict(cusum=11.0),
    dict(means={"reflex/grad_scale": 0.99}), dict(means={"reflex/wrong": 1e-9}),
  ],
)  # fmt: skip
def test_doubt_needs_little(odd):
  assert not reading(0, means={"reflex/grad_scale": 1.0}).doubtful
  assert reading(0, **odd).doubtful
  np.testing.assert_equal(reading(0, probe=math.nan).unread, False)  # there is none to read
