"""A branch with a higher learning rate: tried when it may be, kept only if it wins by far."""

import dataclasses
import math

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Lent, counting_rows, micro_batches
from readings import INTERVAL, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import SetLearningRateScale
from ats_jax.orchestrator.actions.base import carry_out
from ats_jax.orchestrator.policy.decide import Terms, Tried, decide
from ats_jax.orchestrator.policy.growth import (
  CALM_LOOKS,
  CALM_LOOKS_AFTER_LOSS,
  MOST_LOST,
  MOST_TRIALS,
  RATE_FACTOR,
  TRIAL_LOOKS,
  higher_rate,
)
from ats_jax.orchestrator.policy.state import Finding, Judgement, Plateau, PolicyState
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.paired import Effect
from lab.faults.inject import Fault, with_faults

ACT = OrchestratorConfig(mode="act", check_interval=INTERVAL, raise_learning_rate=True)
WELL, NEW, FRESH = Judgement(), PolicyState(), Plateau()
HIGHER = SetLearningRateScale(RATE_FACTOR, 1.0)
WON = Effect(before=3.0, without=2.9, changed=2.8, gain=0.05, error=0.01)


def looks_until_ripe(rates, judgements=(WELL,) * 100, policy=NEW, plateau=FRESH):
  """Looks until it is time for a branch; None if it never is."""
  policy = policy._replace(plateau=plateau)
  for number, (rate, judgement) in enumerate(zip(rates, judgements, strict=False)):
    seen = reading(number, learning_rate=rate)
    policy, tries = higher_rate(policy, seen, judgement)
    if tries is not None:
      assert tries == SetLearningRateScale(RATE_FACTOR * policy.lr_scale, policy.lr_scale)
      return number + 1
  return None


def conclude(cfg, policy, effect):
  """What the policy makes of a trial that ended at step 70."""
  tried = Tried(HIGHER, effect, again=True)
  policy, judgement = decide(Terms(cfg), policy, tried, 70)
  return policy, judgement.decisions[0] if judgement.decisions else None


def test_it_waits_for_calm_looks_at_the_top_of_the_schedule():
  warmup = [0.2, 0.4, 0.6, 0.8, 1.0]
  assert looks_until_ripe(warmup + [1.0] * 20) == len(warmup) + CALM_LOOKS
  assert looks_until_ripe(warmup) is None
  assert looks_until_ripe([1.0, 0.89] * 20) is None  # half of the looks are of a decay
  assert (
    looks_until_ripe(list(np.linspace(1.0, 0.0, 100))) == 1 + CALM_LOOKS
  )  # slow: still at the top
  found = Judgement(finding=Finding("data", 0.1, False, ""))
  for trouble in (found, Judgement(stale=True)):
    assert looks_until_ripe([1.0] * 20, [WELL] * CALM_LOOKS + [trouble] * 20) is None
    assert looks_until_ripe([1.0] * 20, [WELL, trouble, *[WELL] * 20]) == 2 + CALM_LOOKS


@pytest.mark.parametrize(
  "policy",
  [
    PolicyState(latched=True),
    PolicyState(control={"lr_scale": 0.5}),
    PolicyState(control={"lr_scale": 81.0}, lr_wanted=81.0),
  ],
)
def test_it_never_begins_where_the_rate_was_cut_or_is_high_enough(policy):
  assert looks_until_ripe([1.0] * 50, policy=policy) is None


@pytest.mark.parametrize(
  ("changes", "wins"),
  [
    ({}, True),
    ({"changed": 2.88}, False),  # a fifth more progress
    ({"before": 2.9, "changed": 2.895}, False),  # 0.005 nats
    ({"before": 2.8, "without": 2.9, "changed": 2.85}, True),  # better, where the other got worse
    ({"gain": 0.015}, False),  # within the noise of batches
    ({"gain": -0.05}, False),
    ({"changed": math.nan}, False),
    ({"changed": math.inf, "gain": math.nan, "error": math.nan}, False),
  ],
)
def test_who_wins(changes, wins):
  policy = PolicyState(decisions=4, plateau=Plateau(lost=1))
  after, decision = conclude(ACT, policy, WON._replace(**changes))
  assert (decision is not None) == wins and after.plateau.tried == 1
  if decision is None:
    assert after == policy._replace(plateau=Plateau(tried=1, lost=2))
    return
  assert decision.id == 4 and decision.cause == "plateau"
  assert decision.action == HIGHER
  assert decision.confidence > 0.99
  assert (after.lr_scale, after.lr_wanted, after.acted_step, after.decisions) == (3.0, 3.0, 70, 5)
  assert after.plateau.lost == 0


def test_the_confidence_asked_for_counts():
  sure = dataclasses.replace(ACT, confidence=0.999)
  branch = WON._replace(gain=0.025)  # 0.994
  assert conclude(ACT, PolicyState(), branch)[1] is not None
  assert conclude(sure, PolicyState(), branch)[1] is None


def test_branches_end_after_two_that_lost_and_after_a_few_in_all():
  lost, plateau = WON._replace(changed=3.0), Plateau(highest=1.0)
  for number in range(MOST_LOST):
    wanted = CALM_LOOKS_AFTER_LOSS if number else CALM_LOOKS
    assert looks_until_ripe([1.0] * 50, plateau=plateau) == wanted
    plateau = conclude(ACT, PolicyState(plateau=plateau), lost)[0].plateau
  assert looks_until_ripe([1.0] * 50, plateau=plateau) is None
  assert looks_until_ripe([1.0] * 50, plateau=Plateau(highest=1.0, tried=MOST_TRIALS)) is None


# On the real step.

CFG = canonical.config(
  "dense",
  canonical.SUPERVISED | {"optimizer.warmup_steps": 8, "orchestrator.raise_learning_rate": True},
)
LOW, TUNED = 0.02, 1.0  # of a rate of 1e-2


@pytest.fixture(scope="module")
def program():
  """One compiled step for all runs."""
  with jax.set_mesh(canonical.mesh()):
    yield with_faults(canonical.program(CFG))


def train(program, steps, rate, path=None, *, raises=True):
  """The state and the supervisor of a run; and what it recorded."""
  orchestrator = dataclasses.replace(program.cfg.orchestrator, raise_learning_rate=raises)
  cfg = dataclasses.replace(program.cfg, orchestrator=orchestrator)
  lent, program = Lent(), dataclasses.replace(program, cfg=cfg)
  supervisor = Supervisor(program, counting_rows(10**6), path, loop=lent)
  state, fault = canonical.state(CFG), Fault(jnp.float32(1.0), jnp.float32(rate))
  supervisor.start(0, state)
  for step in range(1, steps + 1):
    batch = micro_batches(counting_rows(step), 1)
    lent.last = lambda state, batch=batch: program.train_step(
      state, batch, program.training_rules(1), fault=fault
    )
    state, metrics = lent.last(state)
    state = supervisor.after(step, state, metrics)
    assert int(state.step) == step
  state = supervisor.settle(steps, state, metrics)
  supervisor.close()
  return state, supervisor


@pytest.mark.thorough
def test_the_winner_is_the_state_of_a_run_with_that_rate(program, tmp_path):
  """The arms part where the branch begins; the steps made again are those of the batches."""
  path, length = tmp_path / "decisions.jsonl", 8 * TRIAL_LOOKS
  state, supervisor = train(program, 8 * (2 + CALM_LOOKS) + length, LOW, path)
  ((step, decision),) = supervisor.decisions
  first = step - length
  assert (decision.action, decision.cause) == (HIGHER, "plateau")
  assert float(state.control.lr_scale) == supervisor.policy.lr_wanted == RATE_FACTOR
  (branch,) = [row for row in ledger.read_lines(path) if row["kind"] == "trial"]
  assert (branch["first"], branch["step"], supervisor.replayed) == (first, step, length)
  assert ledger.replay(path) == ledger.decisions(path) == supervisor.decisions
  told = "learning rate times 3 of the schedule's (1 before): held-out loss"
  assert told in "\n".join(tell(path))
  by_hand, fault = canonical.state(CFG), Fault(jnp.float32(1.0), jnp.float32(LOW))
  for number in range(1, step + 1):
    if number == first + 1:
      by_hand = carry_out(HIGHER, by_hand, program.cfg)  # the limit of the rate rises too
    by_hand, _ = program.train_step(
      by_hand, micro_batches(counting_rows(number), 1), program.training_rules(1), fault=fault
    )
  assert int(state.step) == step
  for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(by_hand.model), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.thorough
def test_a_good_rate_is_not_changed_and_trying_leaves_no_trace(program, tmp_path):
  programs = program.train_step._cache_size()
  state, supervisor = train(program, 240, TUNED, path := tmp_path / "decisions.jsonl")
  branches = [row for row in ledger.read_lines(path) if row["kind"] == "trial"]
  assert len(branches) == MOST_LOST and not supervisor.decisions
  assert program.train_step._cache_size() == max(programs, 1)
  other, _ = train(program, 240, TUNED, raises=False)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
    if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
