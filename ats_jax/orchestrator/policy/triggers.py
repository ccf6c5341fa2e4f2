"""What starts a comparison, and with which arms: pure rules that `decide` consults.

Each rule returns a `Proposal` or None. Whether a comparison is allowed at all is decided before.
"""

from collections.abc import Mapping, Sequence

from ats_jax.orchestrator.actions import (
  Action,
  ChangeSettings,
  FullPrecision,
  RecycleExpert,
  Repeat,
  Rollback,
  SetLearningRateScale,
)
from ats_jax.orchestrator.constants import (
  BEHIND,
  CALM_LOOKS,
  EXPERT_LOOKS,
  FAST_TURNOVER,
  HARMLESS,
  LEAST_GAIN,
  LEAST_SCALE,
  RAISE,
  RAISE_SHARE,
  RAISE_SIGMAS,
  RISEN_RATE,
  SLOWER,
  SPAN_LOOKS,
  USUAL_TURNOVER,
)
from ats_jax.orchestrator.policy.state import TRIED, PolicyState, Request
from ats_jax.orchestrator.signals.interval import Reading
from ats_jax.orchestrator.signals.sources import Rise
from ats_jax.orchestrator.trials.arms import Arm, Proposal

HELD_OUT, START, CALM, ROUTER, HOOK = "held-out loss", "start", "calm", "router", "hook"
SOURCE, DAMAGE, RISE = "source", "damage", "rise of the rate"
# Of moe.capacity_factor: 1 to 1.25 in Switch (arXiv:2101.03961), 2 in GShard (arXiv:2006.16668).
ROOMS = (1.0, 1.25, 1.5, 2.0)


def worse(
  policy: PolicyState,
  reading: Reading,
  above: Mapping[str, float],
  margins: Mapping[str, float],
  *,
  eight_bits: bool = False,
) -> Proposal:
  """Some held-out text is worse than it was, by more than noise.

  The same steps again show whether the machine is at fault. Going back without them helps against
  damage, and against batches that do harm; a lower rate, where the rate is too high.

  Args:
    policy: after the look.
    reading: what was looked at.
    above: domain that is worse -> nats above its reference.
    margins: domain -> nats that are noise.
    eight_bits: whether there are 8 bits to be switched off.
  """
  usual = {name: policy.best[name] + margins[name] for name in above}
  again = _careful("machine", Repeat())._replace(mends=True)
  arms = again, *_back_or_slower(policy, reading, eight_bits=eight_bits)
  losses = ", ".join(f"{name} {nats:+.3g} nats".strip() for name, nats in above.items())
  reason = f"held-out loss above its best: {losses}"
  return Proposal(HELD_OUT, reason, arms, tuple(above), usual)


def damaged(reason: str, *, at_once: bool = False) -> Proposal:
  """An invariant shows damage: the same steps again have none of it, and cost no batches.

  Args:
    reason: in words.
    at_once: the run cannot go on as it is.
  """
  again = Arm((Repeat(),), "state", -HARMLESS, None)
  return Proposal(DAMAGE, reason, (again, _careful("state", Rollback())), at_once=at_once)


def unexplained(policy: PolicyState, reading: Reading, rises: Sequence[Rise]) -> Proposal | None:
  """A source of which nothing is held out is predicted worse: is it the model, or the text?"""
  reasons = [rise.says for rise in rises if rise.is_worse is None]
  arms = _back_or_slower(policy, reading) if reasons else ()
  return Proposal(SOURCE, "; ".join(reasons), arms) if arms else None


def _careful(cause: str, *actions: Action) -> Arm:
  """An arm that must be better on all three texts."""
  return Arm(actions, cause, LEAST_GAIN, 0.0, remembers=True)


def _back_or_slower(
  policy: PolicyState, reading: Reading, *, eight_bits: bool = False
) -> tuple[Arm, ...]:
  """Without the last steps, unless it was just done; without 8 bits; at a lower rate; both."""
  arms, slower = list[Arm](), _slower(policy, reading)
  if not policy.rollbacks:
    arms.append(_careful("state or batches", Rollback()))
  if eight_bits:
    arms.append(_careful("8 bits", FullPrecision()))
    arms.append(_careful("8 bits", Rollback(), FullPrecision()))
  if slower is not None:
    arms.append(_careful("learning rate", slower))
    arms.append(_careful("learning rate", Rollback(), slower))
  return tuple(arms)


def _slower(policy: PolicyState, reading: Reading) -> SetLearningRateScale | None:
  """A lower rate: the one at the reference if it has risen since."""
  by, before = SLOWER, policy.lr_scale
  if reading.applied > RISEN_RATE * policy.best_rate > 0.0:
    by = max(policy.best_rate / reading.applied, 1.0 / RAISE**2)
  scale = max(LEAST_SCALE, by * before)
  return SetLearningRateScale(scale, before) if scale < before else None


def too_fast(policy: PolicyState, turnover: float) -> Proposal | None:
  """The first steps moved the weights by far more than is usual: again, at a lower rate.

  There is no earlier state to compare with, and the harm is done when the held-out loss shows it.
  A lower rate may be behind for now, the more surely the faster the weights turned over. Both have
  made all steps by then, so there is nothing to wait for.
  """
  if turnover <= FAST_TURNOVER:
    return None
  least = -BEHIND * (turnover / FAST_TURNOVER) ** 2
  actions = Repeat(from_start=True), _as_usual(policy, turnover)
  arm = Arm(actions, "first rate", least, None)
  return Proposal(START, _turns(turnover), (arm,), at_once=True)


def rose_too_far(policy: PolicyState, reading: Reading) -> Proposal | None:
  """A rise that the schedule declares made text worse, and moves the weights far too fast."""
  turnover = reading.fastest / reading.norm
  if not turnover > FAST_TURNOVER:
    return None
  slower = _as_usual(policy, turnover)
  arms = _careful("first rate", slower), _careful("first rate", Rollback(), slower)
  return Proposal(RISE, f"the learning rate rose, and {_turns(turnover)}", arms)


def _as_usual(policy: PolicyState, turnover: float) -> SetLearningRateScale:
  """A rate at which updates move the weights as much as is usual."""
  scale = max(LEAST_SCALE, policy.lr_scale * USUAL_TURNOVER / turnover)
  return SetLearningRateScale(scale, policy.lr_scale)


def _turns(turnover: float) -> str:
  return f"an update moved the weights by {turnover:.3g} of their norm; usual is 0.001 to 0.02"


def higher_rate(policy: PolicyState, reading: Reading, peak: float) -> Proposal | None:
  """Is the rate too low? No curve tells: a slow run looks like one on harder text. So it is tried.

  A higher rate looks worse at first than it is, as it does not anneal: what wins within a few steps
  and by far is too good to leave.
  """
  scale = RAISE * policy.lr_scale
  is_cut = policy.lr_scale != policy.lr_wanted
  if is_cut or scale > SetLearningRateScale.most or policy.streak("calm") < CALM_LOOKS:
    return None
  if reading.learning_rate < 0.9 * peak:  # in warm-up and while it anneals
    return None
  before, *_, now = (0.0, *policy.history[""][-1 - SPAN_LOOKS :])[-1 - SPAN_LOOKS :]
  least = max(LEAST_GAIN, RAISE_SHARE * (before - now))
  arm = Arm((SetLearningRateScale(scale, policy.lr_scale),), "plateau", least, RAISE_SIGMAS)
  return Proposal(CALM, f"{policy.streak('calm')} calm looks", (arm,))


def dead_expert(policy: PolicyState, reading: Reading) -> Proposal | None:
  """An expert has had no tokens for long: recycle it. That is exact, so it must only do no harm."""
  for layer, expert in reading.starved:
    looks = policy.streak(f"{layer}/{expert}")
    if looks >= EXPERT_LOOKS:
      reason = f"expert {expert} of layer {layer} got next to no tokens in {looks} looks"
      arm = Arm((RecycleExpert(layer, expert),), "router", -HARMLESS, None)
      return Proposal(ROUTER, reason, (arm,))
  return None


def asked_for(action: Action) -> Proposal:
  """What a hook wants tried."""
  return Proposal(HOOK, "a hook asked for it", (Arm((action,), TRIED, HARMLESS, None),))


def more_room(policy: PolicyState, capacity: float | None) -> Request | None:
  """More places for experts, if too much has been dropped for long: no balance mends that."""
  looks = policy.streak("crowded")
  if capacity is None or not looks or looks % EXPERT_LOOKS:
    return None
  for factor in ROOMS:
    if factor > capacity:
      action = ChangeSettings((("moe.capacity_factor", factor),))
      return Request(action, reason="experts had too few places for long")
  return None
