"""A dead expert is seen, recycled at a pause without a change of the loss, and that is undone."""

import canonical
import jax
import numpy as np
import pytest
from helpers import micro_batches, random_rows
from readings import INTERVAL, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import PruneExpert, RecycleExpert
from ats_jax.orchestrator.actions.expert_view import find_layer, view_experts
from ats_jax.orchestrator.policy.decide import STARVED_CHECKS, Interval, Terms, decide
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.experts import OpenExperts, moe_layers
from ats_jax.orchestrator.supervisor import Supervisor

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
def test_a_dead_expert_is_recycled_at_a_pause_and_the_loss_is_the_same(mesh, tmp_path):
  assert moe_layers(CFG) == (LAYER,)
  program, probe = canonical.program(CFG), random_rows(CFG, 8, seed=99)
  state = canonical.state(CFG)
  starve(state)
  path = tmp_path / "decisions.jsonl"
  supervisor = Supervisor(program, probe, path)
  supervisor.start(0, state)
  steps = 4 * (STARVED_CHECKS + 1)
  for step in range(1, steps + 1):
    state, metrics = program.train_step(
      state, micro_batches(random_rows(CFG, 8, seed=step), 1), program.training_rules(1)
    )
    state = supervisor.after(step, state, metrics)
  assert not supervisor.decisions  # there is no time for surgery between two steps
  before = program.eval_step(state.model, probe, program.rules(1))
  programs = program.train_step._cache_size()
  state = supervisor.settle(steps, state, metrics)
  after = program.eval_step(state.model, probe, program.rules(1))
  assert abs(float(after[0] - before[0])) / float(before[2]) < EXACT
  ((_, decision),) = supervisor.decisions
  assert decision.action == RecycleExpert(LAYER, DEAD) and decision.cause == "router"
  assert view_experts(CFG, state, LAYER).twin[DEAD] >= 0
  for step in range(steps + 1, steps + 25):
    state, metrics = program.train_step(
      state, micro_batches(random_rows(CFG, 8, seed=step), 1), program.training_rules(1)
    )
    state = supervisor.after(step, state, metrics)
  supervisor.close()
  assert program.train_step._cache_size() == programs
  assert metrics.layers["moe/load"][0, DEAD] > 0.05
  (outcome,) = [row for row in ledger.read_lines(path) if row["kind"] == "outcome"]
  assert outcome["verdict"] == "helped"
  assert ledger.replay(path) == ledger.decisions(path)

  back = decision.action.undo()
  assert back == PruneExpert(LAYER, DEAD)
  undone = view_experts(CFG, back.apply(state, CFG), LAYER)
  assert not undone.is_open[DEAD] and (undone.twin < 0).all()


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


TERMS = Terms(OrchestratorConfig(mode="act", check_interval=INTERVAL))


@pytest.mark.parametrize(
  ("looks", "pause", "acts"),
  [(STARVED_CHECKS, True, True), (STARVED_CHECKS, False, False), (STARVED_CHECKS - 2, True, False)],
)
def test_it_takes_long_starvation_and_a_pause(looks, pause, acts):
  policy = PolicyState()
  for number in range(looks):
    seen = reading(number, starved=((3, 1),))
    last = number == looks - 1
    policy, judgement = decide(TERMS, policy, Interval(seen, pause and last), seen.step)
    if not last:
      assert not judgement.decisions
  assert [d.action for d in judgement.decisions] == ([RecycleExpert(3, 1)] if acts else [])


def test_surgery_waits_while_something_is_wrong():
  policy = PolicyState()
  for number in range(STARVED_CHECKS + 5):
    seen = reading(number, starved=((3, 1),), held=25)
    policy, judgement = decide(TERMS, policy, Interval(seen, pause=True), seen.step)
    assert not judgement.decisions
  assert jax.tree.leaves(policy.starved) == [STARVED_CHECKS + 5]


@pytest.mark.parametrize(
  ("wobble", "probe", "verdict"),
  [(0.04, 2.1, "helped"), (0.04, 2.3, "harmed"), (0.0, 2.03, "helped"), (0.0, 2.1, "harmed")],
)
def test_what_the_probe_wobbles_by_is_no_harm_of_surgery(wobble, probe, verdict):
  policy, outcome, number = PolicyState(), None, 0
  while outcome is None:
    starved = ((3, 1),) if policy.trial is None else ()
    is_judged = policy.trial is not None and policy.checks + 1 >= policy.wait["trial"]
    usual = 2.0 + wobble * (number % 2)
    seen = reading(number, starved=starved, probe=probe if is_judged else usual)
    policy, judgement = decide(TERMS, policy, Interval(seen, pause=True), seen.step)
    outcome, number = judgement.outcome, number + 1
  assert outcome.verdict == verdict
  undone = [decision.action for decision in judgement.decisions]
  assert undone == ([PruneExpert(3, 1)] if verdict == "harmed" else [])


def test_a_descent_that_slows_down_is_no_harm():
  """Each look has the best loss so far, if by less and less."""
  policy, outcome, number, probe, fall = PolicyState(), None, 0, 12.0, 1.0
  while outcome is None:
    starved = ((3, 1),) if policy.trial is None else ()
    probe, fall = probe - fall, 0.9 * fall
    seen = reading(number, starved=starved, probe=probe)
    policy, judgement = decide(TERMS, policy, Interval(seen, pause=True), seen.step)
    outcome, number = judgement.outcome, number + 1
  assert 0.0 > outcome.after > outcome.before + 0.08 and outcome.verdict != "harmed"
  assert not judgement.decisions
