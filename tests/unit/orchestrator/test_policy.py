"""What the policy concludes from each kind of reading, what it does, and when it keeps still."""

import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest
from readings import (
  BAD_DATA,
  BAD_STATE,
  EDITED,
  HELD,
  HELD_AND_WORSE,
  INTERVAL,
  NAN_GRADIENT,
  NAN_STATE,
  reading,
)

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import (
  RecycleExpert,
  Rollback,
  SetLearningRateScale,
  Stop,
)
from ats_jax.orchestrator.policy.decide import (
  ACTION_BUDGET,
  BROKEN_ADVICE,
  BROKEN_STOP,
  LEAST_SCALE,
  Interval,
  Terms,
  decide,
)
from ats_jax.orchestrator.policy.state import PolicyState, Trial

ACT = OrchestratorConfig(mode="act", check_interval=INTERVAL)


class Looks:
  """A policy that is shown one reading after another, each an interval late."""

  def __init__(self, cfg=ACT):
    self.cfg, self.policy, self.number, self.judgements = cfg, PolicyState(), 0, []

  def __call__(self, times=1, **changes):
    for _ in range(times):
      seen = reading(self.number, **changes)
      step = seen.step + INTERVAL
      self.policy, judgement = decide(Terms(self.cfg), self.policy, Interval(seen), step)
      self.judgements.append(judgement)
      self.number += 1
    return self.judgements[-1]

  @property
  def actions(self):
    return [d.action for judgement in self.judgements for d in judgement.decisions]

  def remedies(self):
    return [d for j in self.judgements for d in j.decisions if d.cause not in ("recovery", "harm")]


@pytest.fixture
def looks():
  """After ten looks at a healthy run."""
  looks = Looks()
  looks(10)
  assert not looks.actions
  return looks


@pytest.mark.parametrize(
  ("fault", "cause", "action"),
  [
    (NAN_STATE, "state", Rollback()),
    (BAD_STATE, "state", Rollback()),
    (EDITED, "state", None),  # to go back would cost more than it did
    ({"miscounted": 3}, "state", None),
    (BAD_DATA, "data", None),
    (BAD_DATA | {"probe": 5.0}, "data", None),  # batches explain it: nothing wrote to the weights
    (NAN_GRADIENT, "system", None),
    (HELD, "learning rate", None),
    (HELD_AND_WORSE, "learning rate", SetLearningRateScale(0.25, 1.0)),
    ({"cusum": 12.0, "recent_z": 1.9}, None, None),
    ({"probe": 2.5}, "learning rate", None),  # worse than it was is not well, whatever the reason
    ({"probe": 2.01, "cusum": 100.0}, None, None),  # the rise is long over
  ],
)
def test_each_fault_has_its_cause_and_its_action(looks, fault, cause, action):
  judgement = looks(**fault)
  assert (judgement.finding and judgement.finding.cause) == cause
  assert looks.actions == ([] if action is None else [action])


@pytest.mark.parametrize(("rate", "is_well"), [(1e-3, False), (2e-3, True)])
def test_a_higher_rate_may_cost_some_loss(looks, rate, is_well):
  judgement = looks(learning_rate=rate, applied=rate, probe=2.07)
  assert (judgement.finding is None) == is_well


def test_noise_of_the_probe_widens_its_margin():
  for noise, is_well in ((0.0, False), (0.1, True)):
    looks = Looks()
    for i in range(40):
      looks(probe=2.0 + noise * (-1) ** i)
    judgement = looks(probe=looks.policy.reference + 0.3)
    assert (judgement.finding is None) == is_well


def test_the_reference_never_rises(looks):
  for i in range(200):
    looks(probe=2.0 + 0.002 * i)
  assert looks.policy.reference == 2.0
  assert looks.judgements[-1].finding is not None and not looks.judgements[-1].good


WIDE, NARROW = (False, 1.0, 128, True), (False, 0.5, 128, True)  # rules of the probe


def test_losses_of_the_probe_by_other_rules_are_not_compared():
  looks = Looks()
  looks(10, rules=WIDE)
  looks(3, rules=NARROW, probe=3.0)  # a smaller model predicts worse: nothing is wrong
  assert looks.policy.reference == 3.0 and not looks.actions
  looks(rules=NARROW, **(BAD_STATE | {"probe": 4.0}))
  assert looks.actions == [Rollback()]


def test_what_is_on_trial_across_a_change_of_the_rules_is_not_judged():
  looks = Looks()
  looks(10, rules=WIDE)
  looks(rules=WIDE, **BAD_STATE)
  looks(rules=WIDE)  # from before the rollback
  helped = looks.policy.helped
  looks(3, rules=NARROW, probe=9.0)
  (outcome,) = [j.outcome for j in looks.judgements if j.outcome]
  assert outcome.verdict == "unclear" and math.isnan(outcome.after)
  assert looks.policy.trial is None and looks.policy.helped == helped and looks.policy.harms == 0


def test_steps_from_before_an_action_are_not_held_against_it(looks):
  looks(**NAN_STATE)
  judgement = looks(**NAN_STATE)
  assert judgement.stale and not judgement.decisions
  assert looks().finding is None


def test_a_rollback_that_helps_is_judged_so_and_believed_in_more(looks):
  looks(**BAD_STATE)
  looks(3)
  outcome = looks.judgements[-1].outcome
  assert outcome is not None and outcome.verdict == "helped"
  assert outcome.before == pytest.approx(3.0) and abs(outcome.after) < 0.01
  assert looks.policy.helped["Rollback"] == (8.2, 0.8)
  assert looks.policy.trial is None


def test_the_ladder_rolls_back_then_slows_then_goes_further_back_then_stops(looks):
  for _ in range(4):
    looks(**NAN_STATE)
    if Stop() not in looks.actions:
      assert looks(**NAN_STATE).stale
  assert looks.actions == [
    Rollback(),
    Rollback(),
    SetLearningRateScale(0.6, 1.0),
    Rollback(back=1),
    SetLearningRateScale(pytest.approx(0.36), 0.6),
    Stop(),
  ]


def test_a_gradient_that_stays_broken_ends_the_run(looks):
  """By steps, not by looks: what passes within some interval must not end it."""
  for broken in range(10, BROKEN_STOP, 10):
    looks(**{**NAN_GRADIENT, "broken": broken})
  assert not looks.actions
  looks(**{**NAN_GRADIENT, "broken": BROKEN_STOP})
  assert looks.actions == [Stop(BROKEN_ADVICE)]


def test_a_lower_rate_is_given_back_by_and_by(looks):
  looks(**HELD_AND_WORSE)
  looks(30)
  scales = [a.scale for a in looks.actions if isinstance(a, SetLearningRateScale)]
  assert scales[0] == 0.25 and scales == sorted(scales) and scales[-1] == 1.0
  assert all(b / a <= 1.1 + 1e-9 for a, b in itertools.pairwise(scales))


def test_what_mended_something_is_not_undone(looks):
  """An undo would restore what was found bad."""
  looks(**HELD_AND_WORSE)
  looks(2)
  judgement = looks(probe=3.0)  # worse than before the action, and nothing else says why
  assert judgement.outcome is not None and judgement.outcome.verdict == "harmed"
  assert not judgement.decisions


def test_weights_that_something_wrote_to_are_mended_first(looks):
  trial = Trial(0, RecycleExpert(0, 1), 100, 0.0, "router")
  wait = {"trial": looks.policy.checks}
  looks.policy = looks.policy._replace(trial=trial, wait=wait, decisions=1)
  judgement = looks(probe=3.0, **EDITED)
  assert judgement.outcome is not None and judgement.outcome.verdict == "harmed"
  # The expert's edit goes with the state that it was made in.
  assert [d.action for d in judgement.decisions] == [Rollback()]


def test_what_a_rollback_left_is_not_gone_back_to_though_it_got_worse(looks):
  looks(3)
  trial = Trial(0, Rollback(), looks.policy.acted_step, 0.5, "state")
  wait = {"trial": looks.policy.checks}
  looks.policy = looks.policy._replace(trial=trial, wait=wait, decisions=1)
  judgement = looks(**BAD_STATE)
  assert judgement.outcome is not None and judgement.outcome.verdict == "harmed"
  assert [d.cause for d in judgement.decisions] == ["state"]
  assert [d.action for d in judgement.decisions] == [Rollback()]


def test_what_does_not_help_is_not_believed_in_for_ever(looks):
  for _ in range(6):
    looks(3, **HELD_AND_WORSE)
    looks(10, learning_rate=4e-3, probe=2.3)
  cuts = [d for d in looks.remedies() if isinstance(d.action, SetLearningRateScale)]
  assert 1 <= len(cuts) < 6
  assert looks.policy.helped["SetLearningRateScale"][1] > 1.2


def test_a_higher_threshold_keeps_it_still():
  looks = Looks(OrchestratorConfig(mode="act", check_interval=INTERVAL, confidence=0.99))
  looks(10)
  looks(**HELD_AND_WORSE)
  assert not looks.actions
  looks(**NAN_STATE)  # is no matter of probability
  assert looks.actions == [Rollback()]


def test_weights_that_follow_new_data_are_no_fault(looks):
  looks(3, **BAD_DATA)
  for rise in (0.5, 1.0, 1.2):  # the model learns the new domain
    judgement = looks(**(BAD_DATA | {"probe": 2.0 + rise}))
    assert judgement.finding is not None and judgement.finding.cause == "data"
  assert not looks.actions
  looks(probe=3.2)
  assert looks.policy.odd == 0 and looks.judgements[-1].good
  looks(4, probe=3.2)
  looks(**(BAD_STATE | {"probe": 6.0}))  # measured from where it is now
  assert looks.actions == [Rollback()]


def test_a_verdict_amid_odd_data_does_not_count(looks):
  looks(**HELD_AND_WORSE)
  looks(2)
  outcome = looks(**BAD_DATA).outcome
  assert outcome is not None and outcome.verdict == "unclear"
  assert looks.policy.judged == 0 and looks.policy.trial is None


def test_without_a_probe_only_what_is_not_finite_is_rolled_back():
  looks = Looks()
  looks(10, probe=math.nan)
  looks(**(BAD_STATE | {"probe": math.nan}))
  assert not any(isinstance(a, Rollback) for a in looks.actions)
  looks(**NAN_STATE)
  assert looks.actions[-1] == Rollback()


def test_observing_decides_and_changes_nothing():
  looks = Looks(OrchestratorConfig(mode="observe", check_interval=INTERVAL))
  looks(10)
  looks(**BAD_STATE)
  looks(**HELD_AND_WORSE)
  assert len(looks.actions) == 2
  assert looks.policy.lr_scale == 1.0 and looks.policy.trial is None
  assert not any(judgement.stale for judgement in looks.judgements)


FAULTS = st.sampled_from(
  [{}, {}, {}, NAN_STATE, BAD_STATE, BAD_DATA, NAN_GRADIENT, HELD, HELD_AND_WORSE]
)


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(FAULTS, max_size=80))
def test_whatever_happens_it_stays_within_its_bounds(faults):
  looks = Looks()
  for fault in faults:
    looks(**fault)
    policy = looks.policy
    assert LEAST_SCALE <= policy.lr_scale <= 1.0
    assert policy.control["bucket"] == 0.0  # to leave out what is finite takes a trial
    assert PolicyState.from_json(json.loads(json.dumps(policy.to_json()))) == policy
  certain = sum(d.confidence == 1.0 for d in looks.remedies())
  stretches = 1 + looks.number * INTERVAL // 1000
  assert len(looks.remedies()) - certain <= 2 * ACTION_BUDGET * stretches
  ids = [d.id for judgement in looks.judgements for d in judgement.decisions]
  assert ids == list(range(len(ids)))


@hypothesis.given(
  st.lists(st.tuples(st.floats(-3.0, 3.0), st.floats(0.0, 15.0)), min_size=1, max_size=60)
)
def test_a_clean_run_is_left_alone(noise):
  looks = Looks()
  for z, cusum in noise:
    looks(probe=2.0 + 0.01 * z, recent_z=z / 2.0, cusum=cusum, loss=2.0 + 0.02 * z)
  assert not looks.actions
  assert all(judgement.good for judgement in looks.judgements)
