"""Is the learning rate too low? No curve tells: a slow run looks like one on harder text.

So it is tried. From one state the same steps are made twice, with the rate as it is and with three
times that. A higher rate looks worse at first than it is, as it does not anneal: what wins within a
few steps and by far is too good to leave. Nothing else raises the rate.

Pure functions of replicated numbers, as the policy.
"""

from statistics import NormalDist
from typing import NamedTuple

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions.base import MOST_RATE, SetLearningRateScale
from ats_jax.orchestrator.policy.decide import Decision, Judgement
from ats_jax.orchestrator.policy.state import Memory
from ats_jax.orchestrator.signals.interval import Reading

FACTOR = 3.0
SPAN = 2  # looks that a branch lasts
WAIT, LONGER = 3, 12  # calm looks before a branch; before the next, if the last one lost
LOST, MOST = 2, 6  # branches lost in a row, and branches of a run, after which there is no other
TOP = 0.9  # of the schedule's highest rate so far: below, the run anneals
GAIN, SHARE = 0.01, 0.25  # nats, and share of the progress in the same steps, to win by
CONFIDENCE = 0.975  # at least, that the training losses are lower, batch by batch


class Plateau(NamedTuple):
  """What is remembered between two looks.

  Attributes:
    highest: learning rate of the schedule so far.
    calm: looks in a row at that rate, with nothing found and nothing done.
    branches: so far.
    lost: of them, in a row at the end.
  """

  highest: float = 0.0
  calm: int = 0
  branches: int = 0
  lost: int = 0


class Branch(NamedTuple):
  """What came of making the same steps again with a higher rate. Losses are nats per token.

  Attributes:
    before: loss on the probe batch where both arms begin.
    kept: the same where the arm ends that keeps the rate.
    raised: where the other ends; NaN or infinite if it diverged.
    gain: how much lower the training loss of the other was, the mean over batches.
    error: standard error of that mean.
  """

  before: float
  kept: float
  raised: float
  gain: float
  error: float


def observe(
  plateau: Plateau, memory: Memory, reading: Reading, judgement: Judgement
) -> tuple[Plateau, bool]:
  """Take in a look; and whether it is time for a branch.

  Args:
    plateau: what the last call returned.
    memory: of the policy, after the look.
    reading: what was looked at.
    judgement: what the policy made of it.
  """
  rate = reading.learning_rate
  at_top = TOP * plateau.highest <= rate <= plateau.highest
  well = not (judgement.stale or judgement.finding or judgement.decisions or memory.trial)
  calm = plateau.calm + 1 if at_top and well else 0
  plateau = plateau._replace(highest=max(plateau.highest, rate), calm=calm)
  spent = plateau.lost >= LOST or plateau.branches >= MOST
  allowed = not (spent or memory.latched) and memory.lr_scale == memory.lr_wanted
  room = FACTOR * memory.lr_scale <= MOST_RATE
  return plateau, allowed and room and calm >= (LONGER if plateau.lost else WAIT)


def conclude(
  cfg: OrchestratorConfig, plateau: Plateau, memory: Memory, branch: Branch, step: int
) -> tuple[Plateau, Memory, Decision | None]:
  """The rate with which training goes on from `step`: a decision if it is the higher one.

  Args:
    cfg: the confidence that is asked for.
    plateau: what the last look left.
    memory: of the policy.
    branch: what came of it.
    step: where both arms end.
  """
  progress, gain = branch.before - branch.kept, branch.kept - branch.raised
  confidence = NormalDist().cdf(branch.gain / max(branch.error, 1e-9))
  # Comparisons with what is not finite are false: such an arm has lost.
  won = gain > max(GAIN, SHARE * progress) and confidence > max(cfg.confidence, CONFIDENCE)
  lost = 0 if won else plateau.lost + 1
  plateau = plateau._replace(calm=0, branches=plateau.branches + 1, lost=lost)
  if not won:
    return plateau, memory, None
  scale = FACTOR * memory.lr_scale
  reason = (
    f"the same steps with {FACTOR:g} times the rate took the held-out loss from "
    f"{branch.before:.4g} to {branch.raised:.4g} instead of {branch.kept:.4g}"
  )
  action = SetLearningRateScale(scale, memory.lr_scale)
  decision = Decision(memory.decisions, action, "plateau", confidence, reason)
  memory = memory._replace(
    decisions=memory.decisions + 1, lr_scale=scale, lr_wanted=scale, acted_step=step
  )
  return plateau, memory, decision
