"""What the policy concludes from each kind of reading, what it does, and when it keeps still."""

import dataclasses
import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest
from readings import (
  ACT,
  BAD_DATA,
  BAD_STATE,
  EDITED,
  HEALTHY,
  INTERVAL,
  NAN_GRADIENT,
  NAN_STATE,
  UNEQUAL_COPIES,
  WORSE,
  Looks,
  reading,
)

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import (
  KINDS,
  EndRun,
  FullPrecision,
  RecycleExpert,
  Repeat,
  Rollback,
  SetLearningRateScale,
  SetWeightDecay,
  Stop,
)
from ats_jax.orchestrator.constants import (
  BROKEN_STOP,
  CALM_LOOKS,
  EXPERT_LOOKS,
  FAST_TURNOVER,
  FIRST_TURNOVERS,
  LEAST_SCALE,
  MOST_REST_LOOKS,
  REST_LOOKS,
  SPAN_LOOKS,
  USUAL_TURNOVER,
)
from ats_jax.orchestrator.policy.decide import BROKEN_ADVICE, Compared
from ats_jax.orchestrator.policy.state import PolicyState, Request
from ats_jax.orchestrator.trials.arms import Score


def looks_of(**given):
  """After twelve looks at a healthy run."""
  looks = Looks(**given)
  looks(12)
  assert not looks.actions and not looks.proposals
  return looks


@pytest.fixture
def looks():
  return looks_of()


def ended(proposal, *losses, waiting=3.0):
  """A comparison in which arms ended at these held-out losses; None = it was not made."""
  score = lambda loss: "not made" if loss is None else Score({"": loss}, (loss,) * 4, loss)
  return Compared(proposal, score(waiting), tuple(map(score, losses)), made=40)


# ---- what is certain


@pytest.mark.parametrize(
  ("fault", "cause", "actions"),
  [
    (NAN_STATE, "state", [Rollback()]),
    (BAD_STATE, "state", [Rollback()]),
    (UNEQUAL_COPIES, "state", [Rollback()]),  # they stay unequal
    (EDITED, "state", []),  # to go back would cost more than it did
    ({"miscounted": 3}, "state", []),
    (NAN_GRADIENT, "system", []),
    (BAD_DATA, None, []),  # other data is no fault, whatever it does to the training loss
    ({"held_steps": 25, "applied": 1.3e-3}, None, []),
  ],
)
def test_each_fault_has_its_cause_and_its_action(fault, cause, actions):
  looks = looks_of(compares=False)
  judgement = looks(**fault)
  assert (judgement.finding and judgement.finding.cause) == cause
  assert looks.actions == actions and judgement.proposal is None


@pytest.mark.parametrize("fault", [NAN_STATE, BAD_STATE, UNEQUAL_COPIES])
def test_damage_is_mended_by_the_same_steps_again(looks, fault):
  proposal = looks(**fault).proposal
  assert proposal.at_once == (fault is NAN_STATE) and not looks.actions
  assert [arm.actions for arm in proposal.arms] == [(Repeat(),), (Rollback(),)]
  waiting = math.nan if proposal.at_once else 2.0
  (decision,) = looks.compared(ended(proposal, 2.004, 2.1, waiting=waiting)).decisions
  assert (decision.action, decision.cause) == (Repeat(), "state")


def test_damage_that_does_less_harm_than_going_back_stays(looks):
  looks.compared(ended(looks(**UNEQUAL_COPIES).proposal, None, 2.1, waiting=2.0))
  for _ in range(REST_LOOKS - 1):
    judgement = looks(**UNEQUAL_COPIES)
    assert judgement.finding is not None and judgement.proposal is None
  assert looks(**UNEQUAL_COPIES).proposal is not None and not looks.actions


@pytest.mark.parametrize("left", [SPAN_LOOKS * INTERVAL, SPAN_LOOKS * INTERVAL - 1])
@pytest.mark.parametrize("fault", [NAN_STATE, BAD_STATE, UNEQUAL_COPIES])
def test_damage_is_mended_though_no_comparison_fits_in_its_share(fault, left):
  looks = looks_of(num_steps=1000)
  looks.policy = looks.policy._replace(made_again=250 - left)
  is_compared = looks(**fault).proposal is not None
  assert is_compared == (left >= SPAN_LOOKS * INTERVAL)
  assert looks.actions == ([] if is_compared else [Rollback()])


@pytest.mark.parametrize("left", [SPAN_LOOKS * INTERVAL, SPAN_LOOKS * INTERVAL - 1])
def test_no_comparison_begins_whose_arms_do_not_fit_in_the_share(left):
  looks = looks_of(num_steps=1000)
  looks.policy = looks.policy._replace(made_again=250 - left)
  judgement = looks(**WORSE)
  assert judgement.finding is not None
  assert (judgement.proposal is not None) == (left >= SPAN_LOOKS * INTERVAL)


def test_what_breaks_again_after_it_went_back_is_not_compared(looks):
  judgement = looks.compared(ended(looks(**NAN_STATE).proposal, math.nan, 2.0, waiting=math.nan))
  assert [d.action for d in judgement.decisions] == [Rollback()] and looks().stale
  slower = SetLearningRateScale(0.5, 1.0)
  assert [d.action for d in looks(**NAN_STATE).decisions] == [Rollback(), slower]


def test_steps_from_before_an_action_are_not_held_against_it():
  looks = looks_of(compares=False)
  looks(**NAN_STATE)
  judgement = looks(**NAN_STATE)
  assert judgement.stale and not judgement.decisions
  assert looks().finding is None


def test_the_ladder_rolls_back_then_slows_then_goes_further_back_then_stops():
  looks = looks_of(compares=False)
  for _ in range(4):
    looks(**NAN_STATE)
    if Stop() not in looks.actions:
      assert looks(**NAN_STATE).stale
  assert looks.actions == [
    Rollback(),
    Rollback(),
    SetLearningRateScale(0.5, 1.0),
    Rollback(back=1),
    SetLearningRateScale(0.25, 0.5),
    Stop(),
  ]


def test_a_gradient_that_stays_broken_ends_the_run(looks):
  """By steps, not by looks: what passes within some interval must not end it."""
  for broken in range(10, BROKEN_STOP, 10):
    looks(**{**NAN_GRADIENT, "broken": broken})
  assert not looks.actions
  looks(**{**NAN_GRADIENT, "broken": BROKEN_STOP})
  assert looks.actions == [Stop(BROKEN_ADVICE)]


def test_a_lower_rate_is_given_back():
  looks = looks_of(compares=False)
  looks(**NAN_STATE), looks(), looks(**NAN_STATE)
  looks(30)
  scales = [a.scale for a in looks.actions if isinstance(a, SetLearningRateScale)]
  assert scales == [0.5, 1.0]


def test_without_a_probe_only_what_is_certain_is_mended():
  looks = Looks(compares=False)
  looks(10, probe=None)
  looks(**(BAD_STATE | {"probe": None}))
  assert not looks.actions and not looks.proposals
  looks(**(NAN_STATE | {"probe": None}))
  assert looks.actions == [Rollback()]


def test_steps_that_break_in_8_bits_are_made_without_them():
  looks = looks_of(eight_bits=True)
  judgement = looks(**NAN_GRADIENT)
  assert [(d.action, d.cause) for d in judgement.decisions] == [(FullPrecision(), "system")]
  assert looks(**NAN_GRADIENT).stale  # of steps before it


# ---- a held-out loss that rises


@pytest.mark.parametrize(("loss", "wins"), [(2.1, True), (2.995, False)])
def test_8_bits_are_switched_off_if_that_wins(loss, wins):
  looks = looks_of(eight_bits=True)
  proposal = looks(**WORSE).proposal
  alone, back = (FullPrecision(),), (Rollback(), FullPrecision())
  assert [arm.actions for arm in proposal.arms[2:4]] == [alone, back]
  judgement = looks.compared(ended(proposal, None, 3.0, loss, 3.0, 3.0, 3.0))
  assert [d.action for d in judgement.decisions] == ([FullPrecision()] if wins else [])
  assert looks.policy.best == ({} if wins else {"": 3.0})  # losses in 8 bits are other ones


def test_a_rise_starts_one_comparison_and_names_what_it_may_be(looks):
  judgement = looks(**WORSE)
  assert judgement.finding.cause == "unclear" and not judgement.finding.certain
  for words in ("+0.5 nats", "learning rate", "damaged weights", "other data than before"):
    assert words in judgement.finding.reason
  arms = [arm.actions for arm in judgement.proposal.arms]
  slower = SetLearningRateScale(0.5, 1.0)
  assert arms == [(Repeat(),), (Rollback(),), (slower,), (Rollback(), slower)]
  assert not judgement.good and not judgement.decisions
  for _ in range(SPAN_LOOKS):  # it is under way
    later = looks(**WORSE)
    assert later.proposal is None and later.finding is None and not later.good


def test_the_domain_that_got_worse_is_named_and_counts():
  looks = Looks()
  held = {"": 2.0, "code": 1.5, "prose": 3.0}
  looks(12, held=held)
  judgement = looks(held=held | {"": 2.01, "prose": 3.4})
  assert judgement.proposal.domains == ("prose",)
  assert "prose +0.4 nats" in judgement.finding.reason and "code" not in judgement.finding.reason
  assert set(judgement.proposal.mended) == {"prose"}


def test_the_winner_is_what_was_done(looks):
  proposal = looks(**WORSE).proposal
  judgement = looks.compared(ended(proposal, None, 2.2))
  assert [(d.action, d.cause) for d in judgement.decisions] == [(Rollback(), "state or batches")]
  assert "it ends at 2.2 in place of 3" in judgement.decisions[0].reason
  assert looks.policy.made_again == 40 and looks(**WORSE).stale  # a look of the losing arm
  looks(2)
  # The second time within a few looks, going back alone has not helped.
  arms = [arm.actions for arm in looks(**WORSE).proposal.arms]
  assert (Rollback(),) not in arms and len(arms) == 3


def test_a_rate_that_won_is_the_policy_s_and_returns(looks):
  proposal = looks(**WORSE).proposal
  looks.compared(ended(proposal, None, 2.9, 2.1))
  assert looks.policy.lr_scale == 0.5 and looks.policy.lr_wanted == 1.0
  looks(30)
  assert looks.policy.lr_scale == 1.0


def test_what_waiting_won_rests_twice_as_long_each_time(looks):
  probe, rests = 2.0, []
  for _ in range(6):
    probe, waited = probe + 0.5, 0
    while (proposal := looks(probe=probe).proposal) is None:
      waited += 1
    rests.append(waited)
    looks.compared(ended(proposal, None, *[probe + 0.1] * 3, waiting=probe))
    assert looks.policy.best[""] == probe  # nothing better could be done
  assert rests[0] == 0 and rests[1:] == [REST_LOOKS * 2**n - 1 for n in range(5)]
  assert rests[-1] <= MOST_REST_LOOKS
  said = [j.finding for j in looks.judgements if j.finding]
  assert len(said) == 6  # once each, and not at each look


def test_a_lower_rate_is_the_one_at_which_all_was_well():
  looks = looks_of()
  looks(held_steps=5, applied=2e-3)  # held: no rise that the schedule declares
  proposal = looks(held_steps=15, applied=4e-3, **WORSE).proposal
  assert proposal.arms[2].actions == (SetLearningRateScale(pytest.approx(0.5), 1.0),)


def test_a_declared_rise_of_the_rate_may_cost_some_loss(looks):
  for probe in (2.2, 2.5, 2.4, 2.3):
    judgement = looks(learning_rate=1e-2, applied=1e-2, probe=probe)
    assert judgement.finding is None and judgement.proposal is None
  looks(8, learning_rate=1e-2, applied=1e-2, probe=2.3)
  assert looks(learning_rate=1e-2, applied=1e-2, probe=2.6).proposal is not None


def test_a_declared_rise_that_turns_the_weights_over_is_compared(looks):
  judgement = looks(learning_rate=1e-2, applied=1e-2, probe=2.5, **turning(0.08))
  slower = SetLearningRateScale(pytest.approx(USUAL_TURNOVER / 0.08), 1.0)
  arms = [arm.actions for arm in judgement.proposal.arms]
  assert arms == [(slower,), (Rollback(), slower)] and "rate rose" in judgement.finding.reason
  looks.compared(ended(judgement.proposal, 2.4, 2.1, waiting=2.6))
  looks(20, learning_rate=1e-2, applied=1e-3)
  assert looks.policy.lr_scale == looks.policy.lr_wanted == pytest.approx(0.1)  # it stays


def test_a_machine_that_computes_wrongly_is_given_another_try(looks):
  looks.compared(ended(looks(**WORSE).proposal, 2.9))  # elsewhere, and still wrong
  for _ in range(REST_LOOKS - 1):
    judgement = looks()  # better by itself, which is not as well as it could be
    assert judgement.finding.certain and not judgement.good and judgement.proposal is None
  (decision,) = looks.compared(ended(looks().proposal, 1.99, 2.1, waiting=2.0)).decisions
  assert (decision.action, decision.cause) == (Repeat(), "state")
  assert looks().stale and looks().good


@pytest.mark.parametrize(("then", "actions"), [(WORSE, [Rollback()]), ({}, [])])
def test_what_it_computed_is_left_where_no_further_try_fits_in_the_share(looks, then, actions):
  looks.compared(ended(looks(**WORSE).proposal, 2.9))
  looks.terms = looks.terms._replace(num_steps=0)
  looks(REST_LOOKS - 1, **then)
  assert not looks.actions
  looks(**then)
  assert looks.actions == actions and len(looks.proposals) == 1
  looks()
  assert looks().good


def test_noise_of_the_probe_widens_its_margin():
  for noise, is_well in ((0.0, False), (0.1, True)):
    looks = Looks()
    for i in range(40):
      looks(probe=2.0 + noise * (-1) ** i)
    assert (looks(probe=looks.policy.best[""] + 0.3).proposal is None) == is_well


def test_losses_of_the_probe_by_other_rules_are_not_compared():
  looks, wide, narrow = Looks(), (False, 1.0, 128, True), (False, 0.5, 128, True)
  looks(12, rules=wide)
  looks(3, rules=narrow, probe=3.0)  # a smaller model predicts worse: nothing is wrong
  assert looks.policy.best[""] == 3.0 and not looks.proposals
  looks(8, rules=narrow, probe=3.0)
  assert looks(rules=narrow, probe=4.0).proposal is not None


@pytest.mark.parametrize("terms", [{"cfg": OrchestratorConfig(mode="observe")}, {"num_steps": 0}])
def test_where_nothing_can_be_compared_it_is_said_once(terms):
  looks = looks_of(**terms)
  judgement = looks(**WORSE)
  assert judgement.finding is not None and judgement.above == 0.5
  assert all(looks(**WORSE).finding is None for _ in range(REST_LOOKS - 1))
  assert not looks.proposals and not looks.actions


def test_observing_decides_and_changes_nothing():
  looks = looks_of(cfg=OrchestratorConfig(mode="observe", check_interval=INTERVAL))
  looks(2, **BAD_STATE)
  assert looks.actions[0] == Rollback() and not looks.judgements[-1].stale
  assert looks.policy.lr_scale == 1.0 and looks.policy.acted_step == 0


# ---- what is tried in a run that is well


def turning(turnover):
  return {"fastest": HEALTHY["norm"] * turnover}


@pytest.mark.parametrize("turnover", [0.5, 0.16, 0.08])
def test_fast_first_steps_are_judged_once_when_the_weights_have_turned_over(turnover):
  looks, warmup = Looks(warmup=50), 50
  due = math.ceil(max(warmup, FIRST_TURNOVERS / turnover - INTERVAL) / INTERVAL)
  looks(due - 1, **turning(turnover))
  assert not looks.proposals
  (arm,) = looks(**turning(turnover)).proposal.arms
  slower = SetLearningRateScale(pytest.approx(USUAL_TURNOVER / turnover), 1.0)
  assert arm.actions == (Repeat(from_start=True), slower) and arm.least < 0.0
  looks(40, **turning(turnover))
  assert len(looks.proposals) == 1


@pytest.mark.parametrize(("share", "due"), [(0.25, 7), (0.1, 4), (0.01, None)])
def test_first_steps_are_judged_while_all_of_them_fit_in_the_share(share, due):
  looks = Looks(dataclasses.replace(ACT, compare_share=share), num_steps=500)
  looks(20, **turning(0.09))
  found = [number for number, j in enumerate(looks.judgements, 1) if j.proposal is not None]
  assert found == ([] if due is None else [due]) and looks.policy.start is None


def test_usual_first_steps_are_not_made_again():
  looks = Looks()
  looks(40, **turning(FAST_TURNOVER))
  assert not looks.proposals and looks.policy.start is None


def test_steps_from_a_rollback_on_are_not_made_again_from_the_start():
  looks = Looks()
  looks(2, **turning(0.1))
  proposal = looks(**NAN_STATE).proposal
  looks.compared(ended(proposal, None, 2.0, waiting=math.nan))
  looks(20, **turning(0.1))
  assert looks.proposals == [proposal]


RAISING = OrchestratorConfig(mode="act", check_interval=INTERVAL, raise_learning_rate=True)


def test_a_higher_rate_waits_for_calm_looks_at_the_top_of_the_schedule():
  looks = Looks(RAISING)
  looks(10, learning_rate=5e-4, applied=5e-4)  # warm-up
  assert not looks.proposals
  looks(CALM_LOOKS)
  (proposal,) = looks.proposals
  assert proposal.arms[0].actions == (SetLearningRateScale(3.0, 1.0),)
  judgement = looks.compared(ended(proposal, 2.0, waiting=2.5))
  assert [d.cause for d in judgement.decisions] == ["plateau"]
  assert looks.policy.lr_scale == looks.policy.lr_wanted == 3.0


def test_where_the_rate_was_cut_none_is_raised():
  looks = Looks(RAISING)
  looks.policy = looks.policy._replace(control={"lr_scale": 0.9})
  looks(CALM_LOOKS)
  assert not looks.proposals


def test_a_dead_expert_is_recycled_unless_that_does_harm():
  for loss, wins in ((2.001, True), (2.1, False)):
    looks = Looks()
    looks(EXPERT_LOOKS - 1, starved=((3, 1),))
    assert not looks.proposals
    proposal = looks(starved=((3, 1),)).proposal
    judgement = looks.compared(ended(proposal, loss, waiting=2.0))
    assert [d.action for d in judgement.decisions] == ([RecycleExpert(3, 1)] if wins else [])


# ---- evaluations that do not improve

PATIENT = OrchestratorConfig(mode="act", check_interval=INTERVAL, patience=2)


def evaluated(looks, *losses):
  return looks(evaluated=losses).decisions


def test_a_run_that_does_not_improve_for_long_ends():
  looks = looks_of(cfg=PATIENT)
  for losses in ((3.0,), (2.0, 2.1), (), (1.9,), (1.95,), ()):
    assert not evaluated(looks, *losses)
  (decision,) = evaluated(looks, math.nan)
  step = (looks.number + 1) * INTERVAL
  assert isinstance(decision.action, EndRun) and decision.action.settings == (("num_steps", step),)
  assert (decision.cause, looks.policy.best_eval) == ("patience", 1.9)
  assert not evaluated(looks, 2.0) and evaluated(looks, 2.0)  # as advice, where it only observes


@pytest.mark.parametrize("terms", [{}, {"cfg": PATIENT, "warmup": 10**6}])
def test_without_patience_or_in_the_warm_up_no_run_ends(terms):
  looks = looks_of(**terms)
  assert not evaluated(looks, 2.0, *[3.0] * 9)


# ---- requests


def made(kind):
  """An action of a kind, with ones for what it must be given."""
  needed = [f for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
  return kind(*(1 for _ in needed))


KINDS_OF_HOOKS = [kind for kind in KINDS.values() if made(kind).can_be_asked_for]


@pytest.mark.parametrize("kind", KINDS_OF_HOOKS)
def test_each_action_is_done_on_request_but_not_while_something_is_wrong(looks, kind):
  action = made(kind)
  judgement = looks(request=Request(action), **WORSE)
  assert not judgement.decisions and judgement.finding is not None
  looks.compared(ended(judgement.proposal, None, 4.0, waiting=2.5))
  looks(SPAN_LOOKS)
  assert [d.action for d in looks(request=Request(action)).decisions] == [action]


@pytest.mark.parametrize("kind", [kind for kind in KINDS_OF_HOOKS if kind.can_be_tried])
@pytest.mark.parametrize(("loss", "wins"), [(1.99, True), (1.999, False)])
def test_each_action_that_is_tried_is_done_only_if_it_wins(looks, kind, loss, wins):
  action = made(kind)
  proposal = looks(request=Request(action, "comparison")).proposal
  assert not looks.actions
  judgement = looks.compared(ended(proposal, loss, waiting=2.0))
  assert [d.action for d in judgement.decisions] == ([action] if wins else [])


DECAY = SetWeightDecay(2.0)


def test_a_request_is_done_where_nothing_is_wrong_and_none_is_compared(looks):
  assert not looks(request=Request(DECAY), **BAD_STATE).decisions[1:]
  looks(20)
  assert [d.cause for d in looks(request=Request(DECAY)).decisions] == ["request"]
  assert looks.policy.control["decay_scale"] == 2.0
  looks(**WORSE)
  assert not looks(request=Request(SetWeightDecay(3.0))).decisions  # the arms would differ by it


def test_what_is_to_be_tried_is_compared_first(looks):
  proposal = looks(request=Request(DECAY, "comparison")).proposal
  assert proposal.arms[0].actions == (DECAY,) and not looks.actions
  assert not looks.compared(ended(proposal, 1.999, waiting=2.0)).decisions
  looks(REST_LOOKS)
  proposal = looks(request=Request(DECAY, "comparison")).proposal
  (decision,) = looks.compared(ended(proposal, 1.99, waiting=2.0)).decisions
  assert (decision.action, decision.cause) == (DECAY, "comparison")


def test_a_rate_that_was_asked_for_is_the_one_that_is_given_back(looks):
  looks(request=Request(SetLearningRateScale(0.5)))
  looks(12)
  assert looks.policy.lr_scale == looks.policy.lr_wanted == 0.5


# ---- whatever happens

FAULTS = st.sampled_from([{}, {}, {}, NAN_STATE, BAD_STATE, BAD_DATA, NAN_GRADIENT, WORSE])


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.lists(FAULTS, max_size=80), st.floats(1.0, 6.0))
def test_whatever_happens_it_stays_within_its_bounds(faults, loss):
  looks = Looks(num_steps=1000)
  for fault in faults:
    proposal = looks(**fault).proposal
    if proposal is not None:
      left = looks.terms.left(looks.policy)
      assert left >= SPAN_LOOKS * INTERVAL
      compared = ended(proposal, *(loss for _ in proposal.arms))
      looks.compared(compared._replace(made=min(compared.made, left)))
    assert LEAST_SCALE <= looks.policy.lr_scale <= 1.0
    assert PolicyState.from_json(json.loads(json.dumps(looks.policy.to_json()))) == looks.policy
  assert looks.policy.made_again <= 0.25 * 1000
  ids = [d.id for judgement in looks.judgements for d in judgement.decisions]
  assert ids == list(range(len(ids)))


@hypothesis.given(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=60))
def test_a_clean_run_is_left_alone(noise):
  looks = Looks()
  for z in noise:
    looks(probe=2.0 + 0.003 * z, loss=2.0 + 0.02 * z)
  assert not looks.actions and not looks.proposals
  assert all(judgement.good for judgement in looks.judgements)


def test_a_reading_has_the_loss_on_all_held_out_text():
  assert reading(0, probe=2.5).probe == 2.5 and math.isnan(reading(0, probe=None).probe)
