"""The probe is scored by the rules of the model that trains, also while these change."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import Lent, counting_rows, make_test_mesh, micro_batches, tiny_config

from ats_jax.orchestrator.policy.growth import TRIAL_LOOKS
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step.program import make_program

EVERY, RUNG, STEPS = 4, 20, 40
# Two rungs: all tokens through the layer, then a quarter of them. The rate is low, so that it is
# calm enough for a branch, which wins.
SETTINGS = {
  "num_steps": STEPS,
  "data.batch_size": 8,
  "model.num_layers": 1,
  "optimizer.learning_rate": 3e-3,
  "optimizer.schedule": "constant",
  "mod.routing": "learned",
  "mod.every": 1,
  "mod.capacity": 0.25,
  "mod.anneal_fraction": 0.5,
  "mod.rungs": 1,
  "orchestrator.mode": "act",
  "orchestrator.check_interval": EVERY,
  "orchestrator.snapshot_interval": EVERY,
  "orchestrator.raise_learning_rate": True,
}


@pytest.fixture(scope="module")
def program():
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield make_program(tiny_config(SETTINGS))


def train(program, path):
  """The supervisor of a run; and the probe's loss after each step by the rules of that step."""
  lent, state, losses = Lent(), program.init(), {}
  supervisor = Supervisor(program, counting_rows(10**6), path, loop=lent)
  supervisor.start(0, state)
  for step in range(1, STEPS + 1):
    rules, batch = program.training_rules(step), micro_batches(counting_rows(step), 1)
    if step in (1, RUNG + 1):
      supervisor.follow(program, step, state)
    lent.last = lambda state, batch=batch, rules=rules: program.train_step(state, batch, rules)
    state, metrics = lent.last(state)
    losses[step] = probe_loss(
      np.asarray(program.eval_step(state.model, counting_rows(10**6), program.rules(step)))
    )
    state = supervisor.after(step, state, metrics)
  supervisor.settle(STEPS, state, metrics)
  supervisor.close()
  return supervisor, losses


@pytest.mark.thorough
def test_the_probe_follows_the_capacity_and_a_branch_whose_rules_change_is_dropped(
  program, tmp_path
):
  supervisor, losses = train(program, path := tmp_path / "decisions.jsonl")
  looks = [row["reading"] for row in ledger.read_lines(path) if row["kind"] == "check"]
  end = RUNG + (2 + TRIAL_LOOKS) * EVERY  # of the branch: the arm without it is not scored again
  assert {look["step"]: look["probe"] for look in looks} == {
    step: "nan" if step == end else losses[step] for step in range(EVERY, STEPS + 1, EVERY)
  }
  capacities = [look["rules"][1] for look in looks]
  assert capacities == [1.0] * (RUNG // EVERY) + [0.25] * ((STEPS - RUNG) // EVERY)
  assert supervisor.policy.rules == dataclasses.astuple(program.rules(STEPS))
  assert supervisor.policy.from_json(supervisor.policy.to_json()) == supervisor.policy
  assert ledger.replay(path) == ledger.decisions(path)
  # It would begin at step 20, after three calm looks; the next begins, and ends, by new rules.
  branches = [row["first"] for row in ledger.read_lines(path) if row["kind"] == "trial"]
  assert branches == [RUNG + 2 * EVERY] and supervisor.replayed == TRIAL_LOOKS * EVERY
