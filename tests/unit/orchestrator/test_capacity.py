"""Experts with too few places: seen for long, then the next rung is asked for at a checkpoint."""

import pytest
from helpers import micro_batches, random_rows, tiny_config
from readings import INTERVAL, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions.settings import ChangeSettings
from ats_jax.orchestrator.policy.capacity import LADDER, LOOKS, more_room
from ats_jax.orchestrator.policy.decide import CROWDED, decide
from ats_jax.orchestrator.policy.requests import Requests
from ats_jax.orchestrator.policy.state import Memory
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step.program import make_program

FEW = {"moe.num_experts": 4, "moe.d_ff": 32, "moe.dispatch": "capacity"}
ACT = {"num_steps": 400, "orchestrator.mode": "act", "orchestrator.check_interval": 4}


def config(factor, **changes):
  return tiny_config(FEW | ACT | {"moe.capacity_factor": factor} | changes)


@pytest.mark.parametrize(
  ("factor", "memory", "wanted"),
  [
    (0.25, Memory(crowded=LOOKS), LADDER[0]),
    (0.25, Memory(crowded=LOOKS - 1), None),
    (0.25, Memory(crowded=LOOKS + 1), None),  # it was asked for, and waits for a checkpoint
    (0.25, Memory(crowded=2 * LOOKS), LADDER[0]),
    (0.25, Memory(crowded=LOOKS, latched=True), None),
    (0.25, Memory(), None),
    (1.0, Memory(crowded=LOOKS), 1.25),
    (1.3, Memory(crowded=LOOKS), 1.5),
    (2.0, Memory(crowded=LOOKS), None),
  ],
)
def test_the_next_rung(factor, memory, wanted):
  asked = more_room(config(factor), memory)
  settings = None if wanted is None else (("moe.capacity_factor", wanted),)
  assert asked == (None if settings is None else ChangeSettings(settings))
  dropless = config(factor, **{"moe.dispatch": "dropless"})
  assert more_room(dropless, memory) is None


def test_looks_in_a_row_are_counted():
  cfg, memory, counted = OrchestratorConfig(mode="act", check_interval=INTERVAL), Memory(), []
  shares = [CROWDED / 2, 2 * CROWDED, 2 * CROWDED, CROWDED / 2, 2 * CROWDED]
  for number, share in enumerate(shares):
    seen = reading(number, means={"moe/dropped": share})
    memory, _ = decide(cfg, memory, seen, seen.step, 32.0)
    counted.append(memory.crowded)
  assert counted == [0, 1, 2, 0, 1]


def test_nothing_is_asked_for_at_the_end_of_a_run():
  for step, waiting in ((399, 1), (400, 0)):
    requests = Requests(config(0.25))
    requests.make_room(Memory(crowded=LOOKS), step)
    assert len(requests.waiting) == waiting


@pytest.mark.parametrize(("factor", "rung"), [(0.25, 1.0), (2.0, None)])
def test_a_crowded_run_asks_for_more_room_at_a_pause(mesh, tmp_path, factor, rung):
  cfg = config(factor)
  program, path = make_program(cfg), tmp_path / "decisions.jsonl"
  state = program.init()
  supervisor = Supervisor(program, random_rows(cfg, 8, seed=99), path)
  supervisor.start(0, state)
  steps = 4 * (LOOKS + 1)
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
