"""The probe: what it is made of, and what follows from it."""

import dataclasses

import canonical
import jax
import pytest
from helpers import counting_rows, make_test_mesh, micro_batches, tiny_config
from readings import EDITED, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.signals.probe import Probe, num_blocks
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program
from ats_jax.train.probe_rows import _shape_of_each

EVERY = 4  # steps from look to look
SETTINGS = canonical.SUPERVISED | {
  "orchestrator.check_interval": EVERY,
  "orchestrator.snapshot_interval": EVERY,
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
  return [look["step"] for look in looks if look["held"]]


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
  sizes = {"data.batch_size": batch, "step.accum_steps": accum, "data.seq_len": seq}
  watched = {"orchestrator.mode": "act", "orchestrator.probe_share": 1.0}
  cfg = tiny_config(sizes | {"num_steps": 100} | watched)
  assert _shape_of_each(cfg, num_blocks(cfg, min(256, seq)), min(256, seq), shards) == (parts, rows)
  assert rows % shards == 0 and parts * rows >= 64
  assert rows * min(seq, 256) <= batch // accum * seq


def test_parts_sum_to_the_whole(program):
  state, rules = canonical.state(CFG), program.rules(1)
  whole, parts = Probe(ROWS), Probe(micro_batches(ROWS, 4))
  score = lambda probe: probe_loss(probe.score(program, state.model, rules))
  assert score(parts) == pytest.approx(score(whole), rel=1e-6)


def test_parts_of_a_domain_are_summed_and_domains_are_kept_apart(program):
  state, rules = canonical.state(CFG), program.rules(1)
  batch = micro_batches(ROWS, 4)
  probe = Probe(batch, ("code", "code", "prose", "code"))
  losses = probe.losses(probe.score(program, state.model, rules))
  alone = Probe({name: x[2] for name, x in batch.items()})
  assert losses["prose"] == probe_loss(alone.score(program, state.model, rules))
  assert losses[""] == probe_loss(probe.score(program, state.model, rules))
  assert losses[""] == pytest.approx(0.75 * losses["code"] + 0.25 * losses["prose"], rel=1e-6)
  one = Probe(batch, ("main",) * 4)
  assert one.losses(one.score(program, state.model, rules)) == {"": losses[""]}


@pytest.mark.mesh
def test_parts_lie_on_eight_devices_as_batches_do(program):
  state, rules = canonical.state(CFG), program.rules(1)
  want = probe_loss(Probe(ROWS).score(program, state.model, rules))
  mesh = make_test_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    program = make_program(program.cfg)
    probe = Probe(to_global(micro_batches(ROWS, 2), mesh))
    sums = probe.score(program, program.init().model, rules)
  assert len(sums) == 2 and probe_loss(sums) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
  ("batch", "seq", "interval", "share", "blocks"),
  [
    (256, 2048, 100, 1e-3, 64),  # no more than all
    (16, 128, 100, 1e-3, 8),  # no less than 1,024 tokens, which cost 0.17 %
    (16, 128, 100, 3e-3, 15),  # 1,843 tokens
    (8, 16, 4, 1e-3, 64),
  ],
)
def test_it_costs_no_more_than_it_may(batch, seq, interval, share, blocks):
  changes = {"num_steps": 100, "data.batch_size": batch, "data.seq_len": seq}
  of_probe = {"orchestrator.check_interval": interval, "orchestrator.probe_share": share}
  cfg = tiny_config(changes | {"orchestrator.mode": "act"} | of_probe)
  assert num_blocks(cfg, min(seq, 256)) == blocks


def test_it_is_read_at_each_look_and_at_checkpoints(program, tmp_path):
  run = Run(program, tmp_path / "decisions.jsonl")(EVERY * 3)
  run.settle()  # where a look was just begun
  run(EVERY + 1).settle()  # and in the middle of an interval
  assert read_at(run.looks()) == [EVERY, EVERY * 2, EVERY * 3, EVERY * 4, EVERY * 4 + 1]
  assert ledger.replay(run.path) == run.supervisor.decisions == []


def test_a_spoilt_state_is_rolled_back(program, tmp_path):
  begin = 88
  run = Run(program, tmp_path / "decisions.jsonl")(begin)
  spoil = lambda path, x: x * 30.0 if "head" in jax.tree_util.keystr(path) else x
  model = jax.tree_util.tree_map_with_path(spoil, run.state.model)
  run.state = dataclasses.replace(run.state, model=model)
  run(EVERY * 3)
  ((step, decision),) = run.supervisor.decisions
  assert (step, decision.action, decision.cause) == (begin + 2 * EVERY, Rollback(), "state")
  run.supervisor.close()
  looks = {r["reading"]["step"]: r for r in ledger.read_lines(run.path) if r["kind"] == "check"}
  check = looks[begin + EVERY]
  assert (check["reading"]["wrong"], check["reading"]["tensor"]) == (1, "head/weight")
  assert "head/weight or its moments" in check["health"]["causes"][0]
  assert ledger.replay(run.path) == run.supervisor.decisions


# ---- the policy


def look(policy, number, **changes):
  terms = Terms(OrchestratorConfig(mode="act", check_interval=10))
  fields = {"rules": (0, 1.0, 0, 1), **changes}
  policy, judgement = decide(terms, policy, Interval(reading(number, **fields)), number * 10 + 20)
  return policy, judgement


def test_the_reference_outlives_looks_without_it():
  policy, _ = look(PolicyState(), 0)
  for number in range(1, 4):
    policy, judgement = look(policy, number, probe=None)
    assert judgement.finding is None
  assert policy.best == {"": 2.0} and policy.streak("calm") == 4


@pytest.mark.parametrize(("found", "actions"), [(dict(probe=3.0), [Rollback()]), ({}, [])])
def test_weights_that_something_else_wrote_are_left_only_if_they_are_worse(found, actions):
  policy, _ = look(PolicyState(), 0)
  policy, judgement = look(policy, 1, **EDITED, **found)
  assert judgement.finding.cause == "state" and "attn/q" in judgement.finding.reason
  assert [d.action for d in judgement.decisions] == actions
  _, judgement = look(policy, 5)
  assert not judgement.stale and judgement.finding is None
