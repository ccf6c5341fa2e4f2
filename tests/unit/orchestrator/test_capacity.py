"""Experts with too few places: seen for long, then the next rung is asked for at a checkpoint."""

import pytest
from helpers import micro_batches, random_rows, tiny_config
from readings import HEALTHY, INTERVAL, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import ChangeSettings
from ats_jax.orchestrator.policy.decide import CROWDED_SHARE, Interval, Terms, decide
from ats_jax.orchestrator.policy.growth import CROWDED_CHECKS as LOOKS
from ats_jax.orchestrator.policy.growth import ROOMS, more_room
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step.program import make_program

FEW = {"moe.num_experts": 4, "moe.d_ff": 32, "moe.dispatch": "capacity"}
ACT = {"num_steps": 400, "orchestrator.mode": "act", "orchestrator.check_interval": 4}


def config(factor, **changes):
  return tiny_config(FEW | ACT | {"moe.capacity_factor": factor} | changes)


@pytest.mark.parametrize(
  ("factor", "policy", "wanted"),
  [
    (0.25, PolicyState(crowded=LOOKS), ROOMS[0]),
    (0.25, PolicyState(crowded=LOOKS - 1), None),
    (0.25, PolicyState(crowded=LOOKS + 1), None),  # it was asked for, and waits for a checkpoint
    (0.25, PolicyState(crowded=2 * LOOKS), ROOMS[0]),
    (0.25, PolicyState(crowded=LOOKS, latched=True), None),
    (0.25, PolicyState(), None),
    (1.0, PolicyState(crowded=LOOKS), 1.25),
    (1.3, PolicyState(crowded=LOOKS), 1.5),
    (2.0, PolicyState(crowded=LOOKS), None),
  ],
)
def test_the_next_rung(factor, policy, wanted):
  asked = more_room(policy, Terms.of(config(factor)).capacity)
  settings = None if wanted is None else (("moe.capacity_factor", wanted),)
  assert (asked and asked.action) == (None if settings is None else ChangeSettings(settings))
  dropless = tiny_config({"moe.num_experts": 4, "moe.d_ff": 32} | ACT)
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
    counted.append(policy.crowded)
  assert counted == [0, 1, 2, 0, 1]


def test_a_crowded_look_asks_and_only_once_in_a_while():
  cfg = OrchestratorConfig(mode="act", check_interval=INTERVAL)
  policy, asked = PolicyState(), []
  for number in range(2 * LOOKS):
    seen = reading(number, means=HEALTHY["means"] | {"moe/dropped": 2 * CROWDED_SHARE})
    policy, judgement = decide(Terms(cfg, capacity=0.25), policy, Interval(seen), seen.step)
    asked.append(judgement.asks is not None)
  assert [number for number, asks in enumerate(asked, 1) if asks] == [LOOKS, 2 * LOOKS]


@pytest.mark.parametrize(
  ("factor", "left", "rung"),
  [
    (0.25, 360, 1.0),
    (2.0, 360, None),
    pytest.param(0.25, 0, None, marks=pytest.mark.slow),  # nothing is asked for at the end
  ],
)
@pytest.mark.thorough
def test_a_crowded_run_asks_for_more_room_at_a_pause(mesh, tmp_path, factor, left, rung):
  steps = 4 * (LOOKS + 1)
  cfg = config(factor, num_steps=steps + left)
  program, path = make_program(cfg), tmp_path / "decisions.jsonl"
  state = program.init()
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
