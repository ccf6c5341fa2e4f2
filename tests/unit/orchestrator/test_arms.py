"""Which arm of a comparison is best: pure rules."""

import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from ats_jax.orchestrator.actions import Repeat, Rollback, SetLearningRateScale
from ats_jax.orchestrator.record.ledger import encode
from ats_jax.orchestrator.trials.arms import Arm, Compared, Proposal, Score, is_mended

BACK = Arm((Rollback(),), "state or batches", 0.01, 0.0, remembers=True)
SLOWER = Arm((SetLearningRateScale(0.5, 1.0),), "learning rate", 0.01, 0.0, remembers=True)


def score(held, coming=2.0, seen=2.0, **domains):
  return Score({"": held, **domains}, (coming,) * 4, seen)


def proposed(*arms, **given):
  return Proposal("held-out loss", "it rose", arms or (BACK,), **given)


def winner(proposal, waiting, scores):
  return Compared(proposal, waiting, tuple(scores), made=0).winner


@pytest.mark.parametrize(
  ("waiting", "other", "wins"),
  [
    (score(3.0, 2.1, 2.1), score(2.9), True),
    (score(3.0, 2.1, 2.1), score(2.995), False),  # within LEAST_GAIN
    (score(3.0, 2.0, 2.1), score(2.5), False),  # no better on the batches that came
    (score(3.0, 2.1, 2.0), score(2.5), False),  # it was spared other data, which is no gain
    (score(3.0, 2.1, math.nan), score(2.5, seen=math.nan), True),  # no batches of before
    (Score({"": 3.0}, (), 2.1), Score({"": 2.9}, (), 2.0), True),  # it ends at once
    (score(math.nan), score(9.0), True),  # what diverged loses to what did not
    (score(3.0, 2.1, 2.1), score(math.inf), False),
    (score(3.0, 2.1, 2.1), score(2.0, coming=math.nan), False),
  ],
)
def test_an_arm_must_be_better_on_each_text(waiting, other, wins):
  assert winner(proposed(), waiting, [other]) == (0 if wins else None)


def test_the_best_wins_and_of_equals_the_least_invasive():
  waiting = score(3.0, 2.5, 2.5)
  arms = proposed(BACK, SLOWER)
  assert winner(arms, waiting, [score(2.5, 2.4, 2.4), score(2.4, 2.3, 2.3)]) == 1
  assert winner(arms, waiting, [score(2.5, 2.4, 2.4), score(2.499, 2.3, 2.3)]) == 0
  assert winner(arms, waiting, ["not made", score(2.4, 2.3, 2.3)]) == 1
  assert winner(arms, waiting, []) is None


def test_a_repair_must_mend():
  repair = BACK._replace(mends=True)
  waiting, better = score(3.0, 2.5, 2.5), score(2.5, 2.4, 2.4)
  for level, wins in ((2.4, None), (2.5, 0)):
    assert winner(proposed(repair, mended={"": level}), waiting, [better]) == wins


def test_only_the_domains_that_got_worse_count():
  waiting = score(3.0, 2.5, 2.5, code=2.0, prose=4.0)
  better = score(3.1, 2.4, 2.4, code=2.5, prose=3.0)
  assert winner(proposed(), waiting, [better]) is None
  assert winner(proposed(domains=("prose",)), waiting, [better]) == 0


def test_batches_must_agree_beyond_their_noise_where_it_is_asked_for():
  raised = proposed(Arm((SetLearningRateScale(3.0, 1.0),), "plateau", 0.01, 2.0))
  waiting = Score({"": 3.0}, (2.0, 2.2, 2.4, 2.6))
  for gains, wins in (((0.1, 0.1, 0.1, 0.1), True), ((0.9, -0.5, 0.4, -0.2), False)):
    coming = tuple(a - b for a, b in zip(waiting.coming, gains, strict=True))
    assert winner(raised, waiting, [Score({"": 2.5}, coming)]) == (0 if wins else None)


def test_what_is_mended_is_where_nothing_is_wrong_in_each_domain():
  there = proposed(mended={"code": 2.0, "prose": 3.0})
  assert is_mended(there, score(0.0, code=2.0, prose=3.0))
  assert not is_mended(there, score(0.0, code=1.0, prose=3.1))
  assert not is_mended(there, score(0.0, coming=math.nan, code=1.0, prose=1.0))
  assert not is_mended(proposed(), score(0.0))  # no level is known


LOSSES = st.one_of(st.floats(0.0, 10.0), st.sampled_from([math.nan, math.inf]))
SCORES = st.builds(lambda a, b, c: score(a, b, c), LOSSES, LOSSES, LOSSES)


@hypothesis.given(SCORES, st.lists(st.one_of(st.just("not made"), SCORES), max_size=2))
def test_the_winner_never_diverged_and_a_ledger_gives_it_again(waiting, scores):
  arms = proposed(BACK, Arm((Repeat(),), "machine", -0.02, None), mended={"": 1.0})
  place = winner(arms, waiting, scores)
  assert place is None or scores[place].finite
  told = lambda value: json.loads(json.dumps(encode(value), allow_nan=False))
  dicts = [s if isinstance(s, str) else s._asdict() for s in scores]
  line = {"proposal": arms.to_json(), "waiting": waiting._asdict(), "scores": dicts, "made": 0}
  assert Compared.from_json(told(line)).winner == place
  assert Proposal.from_json(told(arms.to_json())) == arms
