"""When the first steps are judged, and what the trial needs to win: pure rules."""

import math

import pytest
from readings import reading

from ats_jax.orchestrator.actions import SetLearningRateScale, SetSkips
from ats_jax.orchestrator.policy.rates import (
  FAST_TURNOVER,
  FIRST_TURNOVERS,
  USUAL_TURNOVER,
  lower_rate_won,
  propose_trial,
)
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.trials.paired import Effect

WARMUP, INTERVAL = 50, 10


def asked(policy, step):
  return propose_trial(policy, reading(0)._replace(step=step), None, WARMUP, INTERVAL)


@pytest.mark.parametrize("turnover", [0.5, 0.16, 0.08])
def test_fast_first_steps_are_judged_once_when_the_weights_have_turned_over(turnover):
  policy = PolicyState()._replace(turnover=turnover)
  due = max(WARMUP, 5 * INTERVAL, FIRST_TURNOVERS / turnover)
  policy, found = asked(policy, math.ceil(due) - 1)
  assert found.past is None and not policy.started
  policy, found = asked(policy, math.ceil(due))
  assert found.past == SetLearningRateScale(pytest.approx(USUAL_TURNOVER / turnover), 1.0)
  policy, found = asked(policy, math.ceil(due) + INTERVAL)
  assert found.past is None and policy.started


def test_usual_first_steps_are_not_made_again():
  policy = PolicyState()._replace(turnover=FAST_TURNOVER)
  for step in range(INTERVAL, 1000, INTERVAL):
    policy, found = asked(policy, step)
    assert found.past is None
  assert policy.started


@pytest.mark.parametrize(("made", "tries"), [("Rollback", False), ("SetWeightDecay", True)])
def test_steps_that_left_out_or_edited_something_are_not_made_again(made, tries):
  policy = PolicyState()._replace(turnover=0.5, made={made: (1,)})
  policy, found = asked(policy, 100)
  assert (found.past is not None) == tries and policy.started


@pytest.mark.parametrize(
  ("changed", "slower_wins", "skipping_wins"),
  [(2.9, True, True), (2.98, True, False), (3.02, True, False), (3.04, False, False)],
)
def test_a_lower_rate_may_be_behind_and_leaving_out_must_be_ahead(
  changed, slower_wins, skipping_wins
):
  effect = Effect(6.0, 3.0, changed, 3.0 - changed, math.nan)
  _, has_won = lower_rate_won(
    PolicyState(turnover=FAST_TURNOVER), SetLearningRateScale(0.1, 1.0), effect
  )
  assert has_won == slower_wins
  policy, has_won = lower_rate_won(PolicyState(), SetSkips(5.0, 0.0), effect)
  assert has_won == skipping_wins and len(policy.fears) == (not skipping_wins)


@pytest.mark.parametrize(("changed", "wins"), [(3.11, True), (3.13, False)])
def test_the_faster_the_weights_turned_over_the_further_behind_it_may_be(changed, wins):
  effect = Effect(6.0, 3.0, changed, 3.0 - changed, math.nan)
  policy = PolicyState(turnover=2 * FAST_TURNOVER)
  assert lower_rate_won(policy, SetLearningRateScale(0.1, 1.0), effect)[1] == wins


def test_what_diverged_loses_to_what_did_not():
  for without, changed, wins in [(math.nan, 3.0, True), (3.0, math.nan, False)]:
    effect = Effect(6.0, without, changed, without - changed, math.nan)
    assert lower_rate_won(PolicyState(), SetLearningRateScale(0.1, 1.0), effect)[1] == wins
