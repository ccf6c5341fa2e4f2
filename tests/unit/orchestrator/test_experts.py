"""A dead expert is seen, and recycled if that does no harm."""

import canonical
import numpy as np
import pytest
from fed import Run
from helpers import random_rows

from ats_jax.orchestrator.actions import RecycleExpert
from ats_jax.orchestrator.actions.expert_view import find_layer, view_experts
from ats_jax.orchestrator.constants import EXPERT_LOOKS, SPAN_LOOKS
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.experts import OpenExperts, moe_layers

DEAD, LAYER = 2, 1
EXACT = 1e-5  # nats per token, float32
CFG = canonical.config(
  "experts",
  canonical.STEERED
  | {
    "num_steps": 400,
    "moe.spare_experts": 1,
    "moe.dense_first": 1,
    "moe.router_bias": True,
    "moe.bias_update": "none",
    "moe.aux_loss": 0.0,
    "orchestrator.check_interval": 4,
  },
)


def starve(state):
  """Expert `DEAD` gets no tokens any more."""
  (segment, member), repeat = find_layer(CFG, LAYER)
  router = state.model.segments[segment].layers[member].mlp.router
  router.bias_E[...] = router.bias_E[...].at[repeat, DEAD].set(-100.0)


@pytest.mark.thorough
def test_a_dead_expert_is_recycled_and_learns(mesh, tmp_path):
  assert moe_layers(CFG) == (LAYER,)
  program, rows = canonical.program(CFG), lambda step: random_rows(CFG, 8, seed=step)
  run = Run(program, tmp_path / "decisions.jsonl", probe=rows(99))
  starve(run.state)
  run(4 * EXPERT_LOOKS, rows)
  programs = program.train_step._cache_size()
  run(4 * 8, rows)
  ((step, decision),) = run.end()
  assert decision.action == RecycleExpert(LAYER, DEAD) and decision.cause == "router"
  assert step == 4 * (EXPERT_LOOKS + 1 + SPAN_LOOKS)
  assert view_experts(CFG, run.state, LAYER).twin[DEAD] >= 0
  assert program.train_step._cache_size() == programs
  assert run.metrics.layers["moe/load"][0, DEAD] > 0.05
  assert ledger.replay(run.path) == ledger.decisions(run.path)


@pytest.mark.thorough
def test_recycling_computes_the_same(mesh):
  program, probe, state = canonical.program(CFG), random_rows(CFG, 8, seed=99), canonical.state(CFG)
  starve(state)
  before = program.eval_step(state.model, probe, program.rules(1))
  state = RecycleExpert(LAYER, DEAD).apply(state, CFG)
  after = program.eval_step(state.model, probe, program.rules(1))
  assert abs(float(after[0] - before[0])) / float(before[2]) < EXACT


def test_closed_slots_are_not_starved_and_one_batch_is_not_an_interval(mesh):
  experts = OpenExperts(CFG, canonical.state(CFG))
  slots = experts.is_open.shape[1]
  assert experts.is_open.sum() == 4 and slots == 5
  even = np.where(experts.is_open, 0.25, 0.0)
  assert experts.starved([even, even]) == ()
  without = even.copy()
  without[0, np.flatnonzero(experts.is_open[0])[1]] = 0.0
  slot = int(np.flatnonzero(experts.is_open[0])[1])
  assert experts.starved([without, without]) == ((LAYER, slot),)
  assert experts.starved([without, even]) == ()
