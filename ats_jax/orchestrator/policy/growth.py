"""What a run that is well can be given: a higher learning rate, more places for its experts.

Is the learning rate too low? No curve tells: a slow run looks like one on harder text. So it is
tried. From one state the same steps are made twice, with the rate as it is and with three times
that. A higher rate looks worse at first than it is, as it does not anneal: what wins within a few
steps and by far is too good to leave. Nothing else raises the rate.

Pure rules that `decide` consults.
"""

from statistics import NormalDist

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import Action, ChangeSettings, SetLearningRateScale
from ats_jax.orchestrator.policy.state import Judgement, PolicyState, Request
from ats_jax.orchestrator.signals.interval import Reading
from ats_jax.orchestrator.trials.paired import Effect

RATE_FACTOR = 3.0  # of the learning rate in a trial
TRIAL_LOOKS = 2  # looks that a trial of a higher rate lasts
CALM_LOOKS = 3  # in a row, before a trial
CALM_LOOKS_AFTER_LOSS = 12  # the same after a trial that lost
MOST_LOST = 2  # trials lost in a row, after which there is no other
MOST_TRIALS = 6  # in a run
TOP_SHARE = 0.9  # share of the schedule's highest rate so far: below, the run anneals
# By both of these a trial has to win.
WINNING_NATS = 0.01  # of the held-out loss
WINNING_SHARE = 0.25  # share of the progress in the same steps
CONFIDENCE = 0.975  # at least, that the training losses are lower, batch by batch
# By both of these an action that is tried ahead has to help.
HELPING_ERRORS = 3.2  # standard errors: Student's t with 3 degrees, 97.5 % to one side
HELPING_NATS = 0.003  # of the held-out loss
# Of moe.capacity_factor: 1 to 1.25 in Switch (arXiv:2101.03961), 2 in GShard (arXiv:2006.16668).
ROOMS = (1.0, 1.25, 1.5, 2.0)
CROWDED_CHECKS = 10  # looks in a row, in which too much is dropped


def higher_rate(
  policy: PolicyState, reading: Reading, judgement: Judgement
) -> tuple[PolicyState, Action | None]:
  """Take in a look; returns the higher rate to be tried, if it is time for a trial.

  Args:
    policy: after the look.
    reading: what was looked at.
    judgement: what was made of it.
  """
  plateau, rate = policy.plateau, reading.learning_rate
  at_top = TOP_SHARE * plateau.highest <= rate <= plateau.highest
  well = not (judgement.stale or judgement.finding or judgement.decisions or policy.trial)
  calm = plateau.calm + 1 if at_top and well else 0
  plateau = plateau._replace(highest=max(plateau.highest, rate), calm=calm)
  policy = policy._replace(plateau=plateau)
  spent = plateau.lost >= MOST_LOST or plateau.tried >= MOST_TRIALS
  scale = RATE_FACTOR * policy.lr_scale
  allowed = not (spent or policy.latched) and policy.lr_scale == policy.lr_wanted
  needed = CALM_LOOKS_AFTER_LOSS if plateau.lost else CALM_LOOKS
  if not allowed or scale > SetLearningRateScale.most or calm < needed:
    return policy, None
  return policy, SetLearningRateScale(scale, policy.lr_scale)


def rate_won(
  cfg: OrchestratorConfig, policy: PolicyState, effect: Effect
) -> tuple[PolicyState, float | None]:
  """Confidence that the steps made again with a higher rate are better; None if they lost.

  Args:
    cfg: the confidence that is asked for.
    policy: before.
    effect: what came of it.
  """
  progress, gain = effect.before - effect.without, effect.without - effect.changed
  confidence = NormalDist().cdf(effect.gain / max(effect.error, 1e-9))
  # A comparison with NaN is false, so an arm that diverged has lost.
  is_enough = gain > max(WINNING_NATS, WINNING_SHARE * progress)
  won = is_enough and confidence > max(cfg.confidence, CONFIDENCE)
  plateau = policy.plateau
  lost = 0 if won else plateau.lost + 1
  plateau = plateau._replace(calm=0, tried=plateau.tried + 1, lost=lost)
  return policy._replace(plateau=plateau), confidence if won else None


def helps(effect: Effect) -> bool:
  """Whether an action that was tried ahead helps beyond noise, and by enough to matter."""
  return effect.gain > max(HELPING_ERRORS * effect.error, HELPING_NATS)


def more_room(policy: PolicyState, capacity: float | None) -> Request | None:
  """More places for experts, if too much has been dropped for long: no balance mends that.

  Args:
    policy: after a look.
    capacity: `moe.capacity_factor` as it is now; None if nothing is dropped.
  """
  is_long = policy.crowded > 0 and policy.crowded % CROWDED_CHECKS == 0
  if capacity is None or not is_long or policy.latched:
    return None
  for factor in ROOMS:
    if factor > capacity:
      action = ChangeSettings((("moe.capacity_factor", factor),))
      return Request(action, reason="experts had too few places for long")
  return None
