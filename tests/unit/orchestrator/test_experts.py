"""A dead expert is seen, and recycled if that does no harm."""

import canonical
import numpy as np
import pytest
from fed import Run
from helpers import random_rows

from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import (
  MergeExperts,
  PruneExpert,
  RecycleExpert,
  ScaleTemperature,
  SetExpertDropout,
)
from ats_jax.orchestrator.actions.expert_view import find_layer, view_experts
from ats_jax.orchestrator.constants import EXPERT_LOOKS, SPAN_LOOKS
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.signals.experts import OpenExperts

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
  program, rows = canonical.program(CFG), lambda step: random_rows(CFG, 8, seed=step)
  run = Run(program, tmp_path / "decisions.jsonl", probe=rows(99))
  assert OpenExperts(CFG, run.state).layers == (LAYER,)
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


def spoil(state):
  """What expert `DEAD` adds is far too large."""
  (segment, member), repeat = find_layer(CFG, LAYER)
  down = state.model.segments[segment].layers[member].mlp.down.weight
  factors = np.ones((*down.shape[:2], 1, 1), np.float32)
  factors[repeat, DEAD] = 100.0
  down[...] = down[...] * factors


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("action", "is_spoilt"),
  [
    (PruneExpert(LAYER, DEAD), True),
    (PruneExpert(LAYER, DEAD), False),
    (ScaleTemperature(2.0), False),
    (SetExpertDropout(0.5), False),
  ],
)
def test_a_sound_layer_is_left_alone(mesh, tmp_path, asked, action, is_spoilt):
  """What is tried on it loses its comparison; where an expert does harm, closing it wins."""
  asked |= {64: hooks.Try(action)}
  run = Run(canonical.program(CFG), tmp_path / "decisions.jsonl")(64)
  if is_spoilt:
    spoil(run.state)
  run(4 * 6)
  decisions = [decision.action for _, decision in run.end()]
  assert decisions == ([action] if is_spoilt else []) and len(run.lines("comparison")) == 1
  assert view_experts(CFG, run.state, LAYER).is_open[DEAD] != is_spoilt
  assert ledger.replay(run.path) == ledger.decisions(run.path)


@pytest.mark.thorough
def test_recycling_computes_the_same(mesh):
  program, probe, state = canonical.program(CFG), random_rows(CFG, 8, seed=99), canonical.state(CFG)
  starve(state)
  before = program.eval_step(state.model, probe, program.rules(1))
  state = RecycleExpert(LAYER, DEAD).apply(state, CFG)
  after = program.eval_step(state.model, probe, program.rules(1))
  assert abs(float(after[0] - before[0])) / float(before[2]) < EXACT


@pytest.mark.thorough
def test_an_edit_is_told_with_the_held_out_loss_before_and_after_it(mesh, tmp_path, asked, caplog):
  asked |= {8: MergeExperts(LAYER, 0, 1)}
  run = Run(canonical.program(CFG), tmp_path / "decisions.jsonl")(16)
  before = run.probe_loss()
  caplog.set_level("INFO", logger="absl")
  run.settle()
  (row,) = run.lines("weighed")
  assert (row["before"], row["after"]) == pytest.approx((before, run.probe_loss()), rel=1e-6)
  assert row["before"] != row["after"]
  assert f"{row['before']:.6g} before, {row['after']:.6g} after" in caplog.text
  assert f"held-out loss {row['before']:.6g} before it" in "\n".join(tell(run.path))


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
