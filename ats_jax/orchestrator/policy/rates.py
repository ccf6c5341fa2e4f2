"""Is the learning rate too high? Is a kind of batch harmful? Trials of a lower rate and of skips.

The schedule's rate may be wrong from the start, when there is nothing to compare it with. If the
first steps move the weights by far more than is usual, they are made again at a lower rate, and the
run goes on with the better outcome. The step itself limits later rises (`step.reflex`).

Pure rules that `decide` consults.
"""

from typing import NamedTuple

from ats_jax.orchestrator.actions import KINDS, Action, SetLearningRateScale, SetSkips
from ats_jax.orchestrator.policy.state import Finding, PolicyState
from ats_jax.orchestrator.signals.interval import Reading
from ats_jax.orchestrator.trials.paired import Effect

# Norm of an update over the norm of the first weights. Usual is 0.001 to 0.02 in the first thousand
# steps; at 0.045 all weights turn over in 22 steps.
FAST_TURNOVER = 0.045  # from here on the rate is doubted
USUAL_TURNOVER = 0.008  # to which a lower rate aims
# After these the first steps are judged. Earlier, a rate ten times too high still looks well.
FIRST_LOOKS = 5
FIRST_TURNOVERS = 7.0  # of the weights
LEAST_GAIN = 0.03  # nats of the held-out loss by which to win
# Nats by which the first steps may be worse at the lower rate, which gains later. Times the square
# of the turnover over FAST_TURNOVER: the faster the weights turn over, the surer it is. At four
# times FAST_TURNOVER the two are within 0.3 of each other after 60 steps, and 0.8 apart after 400.
BEHIND = 0.03
SURPRISES = 4  # batches in a look
LASTING = 6  # looks at odd batches, from which on they are no burst
SKIPS = 5.0
LOOKS_AFTER_LOSS = 12  # after a trial, before the next one
MOST_TRIALS = 4  # in a run
LEAST_SCALE = 1e-3


class ProposedTrial(NamedTuple):
  """The trial that the policy proposes, if any.

  Attributes:
    coming: an action to try on the next steps, with and without it.
    past: an action to try on all steps of the run so far, made again.
  """

  coming: Action | None = None
  past: Action | None = None


def watch_start(policy: PolicyState, reading: Reading) -> PolicyState:
  """Track the relative size of updates in the first steps (`turnover`)."""
  norm, moved = reading.means["train/param_norm"], reading.means["train/update_norm"]
  first = policy.first_norm if policy.first_norm is not None or reading.first > 1 else norm
  if first is None or policy.started:
    return policy
  turnover = max(policy.turnover, moved / max(first, 1e-30))
  return policy._replace(first_norm=first, turnover=turnover)


def propose_trial(
  policy: PolicyState, reading: Reading, finding: Finding | None, warmup: int, interval: int
) -> tuple[PolicyState, ProposedTrial]:
  """Propose a trial against the finding of a look.

  Args:
    policy: after the look.
    reading: what was looked at.
    finding: what was found.
    warmup: steps.
    interval: steps of a look.
  """
  if policy.latched or policy.trial is not None:
    return policy, ProposedTrial()
  if not policy.started and reading.step >= max(warmup, FIRST_LOOKS * interval):
    # Steps made again from the first state would lack edits and repeat what a rollback undid.
    edited = any(KINDS[kind].edits for kind in policy.made)
    if policy.turnover <= FAST_TURNOVER or edited:
      policy = policy._replace(started=True)
    elif reading.step >= FIRST_TURNOVERS / policy.turnover:
      scale = max(LEAST_SCALE, policy.lr_scale * USUAL_TURNOVER / policy.turnover)
      past = SetLearningRateScale(scale, policy.lr_scale)
      return policy._replace(started=True), ProposedTrial(past=past)
  is_rested = not policy.fears or policy.checks >= policy.fears[-1] + LOOKS_AFTER_LOSS
  if finding is None or finding.certain or len(policy.fears) >= MOST_TRIALS or not is_rested:
    return policy, ProposedTrial()
  if finding.cause == "data" and policy.odd >= LASTING and reading.surprising >= SURPRISES:
    bucket = policy.control["bucket"]
    return policy, ProposedTrial(coming=SetSkips(SKIPS, bucket) if bucket < SKIPS else None)
  return policy, ProposedTrial()


def lower_rate_won(policy: PolicyState, action: Action, effect: Effect) -> tuple[PolicyState, bool]:
  """Whether the run goes on with the steps made again, judged by the held-out loss alone."""
  # A comparison with NaN is false, so an arm that diverged has lost.
  surely = (policy.turnover / FAST_TURNOVER) ** 2
  least = LEAST_GAIN if isinstance(action, SetSkips) else -BEHIND * surely
  has_won = effect.without - effect.changed > least
  diverged = effect.without != effect.without and effect.changed == effect.changed
  if has_won or diverged:
    return policy, True
  if isinstance(action, SetSkips):
    policy = policy._replace(fears=(*policy.fears, policy.checks))
  return policy, False
