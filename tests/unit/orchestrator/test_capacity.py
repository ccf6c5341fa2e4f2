"""Experts with too few places: seen for long, then the next rung is asked for at a checkpoint."""

import dataclasses

import canonical
import pytest
from helpers import micro_batches, random_rows
from readings import HEALTHY, INTERVAL, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import ChangeSettings
from ats_jax.orchestrator.constants import CROWDED_SHARE
from ats_jax.orchestrator.constants import EXPERT_LOOKS as LOOKS
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.policy.triggers import ROOMS, more_room
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.supervisor import Supervisor

ACT = canonical.SUPERVISED | {"orchestrator.check_interval": 4}


def crowded(looks):
  return PolicyState(streaks={"crowded": looks})


def config(factor):
  few = {"model.num_layers": 1, "moe.dispatch": "capacity", "moe.capacity_factor": factor}
  return canonical.config("experts", ACT | few)


@pytest.mark.parametrize(
  ("factor", "policy", "wanted"),
  [
    (0.25, crowded(LOOKS), ROOMS[0]),
    (0.25, crowded(LOOKS - 1), None),
    (0.25, crowded(LOOKS + 1), None),  # it was asked for, and waits for a checkpoint
    (0.25, crowded(2 * LOOKS), ROOMS[0]),
    (0.25, PolicyState(), None),
    (1.0, crowded(LOOKS), 1.25),
    (1.3, crowded(LOOKS), 1.5),
    (2.0, crowded(LOOKS), None),
  ],
)
def test_the_next_rung(factor, policy, wanted):
  asked = more_room(policy, Terms.of(config(factor)).capacity)
  settings = None if wanted is None else (("moe.capacity_factor", wanted),)
  assert (asked and asked.action) == (None if settings is None else ChangeSettings(settings))
  dropless = canonical.config("experts", ACT)
  assert more_room(policy, Terms.of(dropless).capacity) is None


def test_looks_in_a_row_are_counted():
  cfg = OrchestratorConfig(mode="act", check_interval=INTERVAL)
  policy, counted = PolicyState(), []
  shares = [
    CROWDED_SHARE / 2,
    2 * CROWDED_SHARE,
    2 * CROWDED_SHARE,
    CROWDED_SHARE / 2,
    2 * CROWDED_SHARE,
  ]
  for number, share in enumerate(shares):
    seen = reading(number, means=HEALTHY["means"] | {"moe/dropped": share})
    policy, _ = decide(Terms(cfg), policy, Interval(seen), seen.step)
    counted.append(policy.streak("crowded"))
  assert counted == [0, 1, 2, 0, 1]


def test_a_crowded_look_asks_and_only_once_in_a_while():
  cfg = OrchestratorConfig(mode="act", check_interval=INTERVAL)
  policy, asked = PolicyState(), []
  for number in range(2 * LOOKS):
    seen = reading(number, means=HEALTHY["means"] | {"moe/dropped": 2 * CROWDED_SHARE})
    policy, judgement = decide(Terms(cfg, capacity=0.25), policy, Interval(seen), seen.step)
    asked.append(judgement.asks is not None)
  assert [number for number, asks in enumerate(asked, 1) if asks] == [LOOKS, 2 * LOOKS]


@pytest.mark.parametrize("ends", [False, True])  # then nothing is asked for
@pytest.mark.thorough
def test_a_crowded_run_asks_for_more_room_at_a_pause(mesh, tmp_path, ends):
  steps, rung = 4 * (LOOKS + 1), None if ends else 1.0
  cfg = config(0.25)
  program, state, path = canonical.program(cfg), canonical.state(cfg), tmp_path / "decisions.jsonl"
  if ends:
    program = dataclasses.replace(program, cfg=dataclasses.replace(cfg, num_steps=steps))
  supervisor = Supervisor(program, random_rows(cfg, 8, seed=99), path)
  supervisor.start(0, state)
  for step in range(1, steps + 1):
    state, metrics = program.train_step(
      state, micro_batches(random_rows(cfg, 8, seed=step), 1), program.training_rules(1)
    )
    state = supervisor.after(step, state, metrics)
  assert not supervisor.decisions
  for _ in range(2):  # asked for at the first look, if at all, and done at the next
    state = supervisor.settle(steps, state, metrics)
  supervisor.close()
  assert supervisor.wants_restart == (rung is not None)
  made = [decision.action.settings for _, decision in supervisor.decisions]
  assert made == ([] if rung is None else [(("moe.capacity_factor", rung),)])
  assert ledger.replay(path) == ledger.decisions(path)
