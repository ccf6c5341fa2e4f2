"""From what was seen to what is done: a pure function of replicated numbers.

Every process decides alike, and a ledger of readings gives the same decisions again. One action at
a time is on trial. Its effect is measured on the probe batch; what did harm is undone, and a policy
that does harm twice only watches from then on.

The order of the questions is that of their cost. Is the state broken, or worse than it was on a
batch that never changes? Then the state is at fault. Is only the training loss high? Then the data
is: nothing is rolled back. The learning rate comes last, as cutting it lasts.
"""

import math
from typing import NamedTuple

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions.base import (
  Action,
  RecycleExpert,
  Rollback,
  SaveCheckpoint,
  ScaleTemperature,
  SetExpertDropout,
  SetLearningRateScale,
  SetSkips,
  SetWeightDecay,
  Stop,
  Surgery,
  undo,
)
from ats_jax.orchestrator.policy.requests import Request
from ats_jax.orchestrator.policy.state import Memory, Trial
from ats_jax.orchestrator.signals.interval import Reading

MARGIN, MARGIN_SIGMAS = 0.08, 6.0  # nats; how far the probe's loss may be above its reference
RATE_ROSE, WIDER = 1.1, 3.0  # a schedule that raises its rate may cost some loss
CUSUM = 20.0  # false alarms below one in two hundred runs of 20,000 clean steps
EDITED = 0.01  # of the weights' norm; rounding to bfloat16 moves it by less than 0.004
BROKEN, HELD, SKIPPED, RECENT_Z = 8, 20, 4, 2.0  # steps, steps, steps, sigmas: from here an alarm
PRIOR_ODDS = -math.log(2000.0)  # of a fault in an interval
EVIDENCE = 12.0  # at most, log odds
HORIZON = 2  # looks until an action is judged
WAIT = {"Rollback": 3, "SetLearningRateScale": 5, "SetSkips": 1, "RecycleExpert": 10}  # looks
CROWDED = 0.3  # share of choices that are dropped, from which on experts have too few places
STARVED_CHECKS = 10  # looks in a row without tokens, after which an expert is dead
BUDGET, BUDGET_STEPS = 3, 1000
LADDER, LADDER_RATE, LADDER_CHECKS = 4, 0.6, 8  # the fourth rollback in eight looks is a stop
CUT, LEAST_SCALE, RECOVER, RECOVER_CHECKS = 0.5, 0.1, 1.1, 5
MORE_SKIPS, MOST_SKIPS = 32.0, 128.0  # beyond what the reflex is given at first
LATCH_HARMS, LATCH_JUDGED = 2, 5
LEAST_HARM = 0.005  # nats
UNJUDGED = SetSkips | SaveCheckpoint | Stop
EDITS = Rollback | Surgery | ScaleTemperature  # of the state


class Finding(NamedTuple):
  """What is wrong.

  Attributes:
    cause: "state", "learning rate", "data" or "system".
    confidence: probability that it is so.
    certain: no statistics involved: numbers that are not finite.
    reason: in words.
  """

  cause: str
  confidence: float
  certain: bool
  reason: str


class Decision(NamedTuple):
  """An action, and why.

  Attributes:
    id: counts decisions of a run.
    action: what to do.
    cause: see `Finding`; "recovery" for taking back an action that did its work, "harm" for undoing
      one that did harm; that of a `Request`.
    confidence: probability that there is this fault, and that the action helps.
    reason: in words.
  """

  id: int
  action: Action
  cause: str
  confidence: float
  reason: str


class Outcome(NamedTuple):
  """What an action changed.

  Attributes:
    id: of the decision.
    verdict: "helped", "no effect" or "harmed"; "unclear", and not counted, if the data is odd now
      or the probe is scored by other rules.
    before: how far the probe's loss was above its reference, nats.
    after: the same, `HORIZON` looks later; NaN if it cannot be compared.
  """

  id: int
  verdict: str
  before: float
  after: float


class Judgement(NamedTuple):
  """What a look came to.

  Attributes:
    stale: the steps are from before the last action; nothing was concluded.
    good: the state at the start of the interval has proven itself.
    finding: what is wrong, if anything.
    outcome: of an earlier action.
    decisions: in the order to be applied.
  """

  stale: bool = False
  good: bool = False
  finding: Finding | None = None
  outcome: Outcome | None = None
  decisions: tuple[Decision, ...] = ()


def decide(
  cfg: OrchestratorConfig,
  memory: Memory,
  reading: Reading,
  step: int,
  base_bucket: float,
  *,
  pause: bool = False,
  request: Request | None = None,
) -> tuple[Memory, Judgement]:
  """Judge the last action, find what is wrong now, and say what to do about it.

  Args:
    cfg: the threshold, and whether actions are applied.
    memory: what the last call returned.
    reading: an interval of steps.
    step: at which the actions are applied.
    base_bucket: what the reflex was given at first.
    pause: whether the loop waits anyway, as before a checkpoint: there is time for surgery.
    request: what somebody asks for; it is done if nothing is wrong and no action is on trial.
  """
  memory = memory._replace(checks=memory.checks + 1)
  if memory.bucket is None:
    memory = memory._replace(bucket=base_bucket)
  if reading.first <= memory.acted_step:
    return memory, Judgement(stale=True)
  # The probe by other rules (8 bits switched off, `mod.capacity` a rung lower) is the loss of
  # another model, and no loss of before is held against it. Earlier weights cannot be scored by
  # the new rules either: their thresholds belong to the capacity that they were trained with. So
  # the reference is taken anew, at the first look that finds nothing, and an action on trial stays
  # unjudged. A fault in that very interval shows in all that is read but the probe.
  changed = reading.rules != memory.rules
  if changed:
    memory = memory._replace(reference=None, rules=reading.rules)
  finding = diagnose(memory, reading)
  excess = _excess(memory, reading)
  margin = _margin(memory, reading)
  requested = memory.trial is not None and memory.trial.requested
  judged = _judge_trial(memory, reading, finding, excess, margin, changed=changed)
  memory, outcome, undone = judged
  wanted = [] if finding is None else _remedy(cfg, memory, reading, finding, base_bucket)
  memory = _remember(memory, reading, finding, excess, margin)
  if requested or (finding is not None and finding.certain):
    # What did harm may have broken the state: both are to be mended. Edits of it are gone with it.
    rolls_back = any(isinstance(action, Rollback) for action, *_ in wanted)
    wanted += [part for part in undone if not (rolls_back and isinstance(part[0], EDITS))]
  else:
    wanted = undone or wanted
  wanted = wanted or _recover(memory, finding, base_bucket)
  if request is not None and not wanted and finding is None and memory.trial is None:
    wanted = [(request.action, request.cause, 1.0, request.reason)]
  if pause and not wanted and finding is None:
    wanted = _improve(cfg, memory, reading)
  decisions = tuple(Decision(memory.decisions + i, *parts) for i, parts in enumerate(wanted))
  for decision in decisions:
    memory = _act(cfg, memory, decision, step, excess)
  good = reading.sound and not excess > margin and (finding is None or finding.cause == "data")
  return memory, Judgement(False, good, finding, outcome, decisions)


def diagnose(memory: Memory, reading: Reading) -> Finding | None:
  """What is wrong, if anything."""
  excess, margin = _excess(memory, reading), _margin(memory, reading)
  probe = f"held-out loss {reading.probe:.4g}, {excess:+.3g} from when all was well"
  if not reading.sound:
    reason = f"weights or their held-out loss ({reading.probe}) are not finite"
    return Finding("state", 1.0, True, reason)
  if reading.edited > EDITED:
    change = f"the norm of the weights changed by {reading.edited:.2g} of itself in one step"
    return Finding("state", 1.0, True, f"{change}, beyond its update: something else wrote to them")
  if reading.broken >= BROKEN:
    steps = f"no loss or gradient was finite in the last {reading.broken} steps"
    return Finding("system", 1.0, True, f"{steps}, though the weights are: {probe}")
  is_worse, is_held = excess > margin, reading.held >= HELD
  # The CUSUM remembers long: a rise that the statistics have taken in by now is no surprise.
  rising = reading.cusum > CUSUM and reading.recent_z > RECENT_Z
  surprised = rising or reading.skipped >= SKIPPED
  fault = _sigmoid(PRIOR_ODDS + min(reading.cusum / 2.0, EVIDENCE))
  worse = _sigmoid(_log_odds_outlier(MARGIN_SIGMAS * excess / margin))
  held = f"the last {reading.held} updates had to be shrunk"
  if is_worse and memory.odd:
    reason = f"{probe}, after {memory.odd} looks at odd batches: the weights follow other data"
    return Finding("data", fault, False, reason)
  if is_worse and is_held and excess < 4.0 * margin:
    return Finding("learning rate", worse, False, f"{held}; {probe}")
  if is_worse and surprised:
    return Finding("state", fault * worse, False, f"{probe}; training loss {_raised(reading)}")
  if is_held:
    return Finding("learning rate", 0.0, False, f"{held}, which is enough: {probe}")
  if surprised:
    reason = f"training loss {_raised(reading)}, but {probe}: the batches are odd, not the weights"
    return Finding("data", fault, False, reason)
  return None


def _raised(reading: Reading) -> str:
  return (
    f"{reading.loss:.4g}, evidence of a rise {reading.cusum:.3g} (alarm at {CUSUM:g}), "
    f"{reading.skipped} batches left out"
  )


def _remedy(
  cfg: OrchestratorConfig, memory: Memory, reading: Reading, finding: Finding, base_bucket: float
) -> list[tuple[Action, str, float, str]]:
  """What would help, if it is allowed."""
  actions = _candidates(memory, reading, finding, base_bucket)
  if not actions:
    return []
  kind = type(actions[0]).__name__
  yes, no = memory.helped.get(kind, (1.0, 0.0))
  confidence = 1.0 if finding.certain else finding.confidence * yes / (yes + no)
  recent = [s for s in memory.spent if s > reading.step - BUDGET_STEPS]
  waiting = memory.trial is not None or memory.checks < memory.wait.get(kind, 0)
  if finding.certain:
    actions = [Stop()] if memory.latched else actions
  elif memory.latched or confidence < cfg.confidence or waiting or len(recent) >= BUDGET:
    return []
  return [(action, finding.cause, confidence, finding.reason) for action in actions]


def _candidates(
  memory: Memory, reading: Reading, finding: Finding, base_bucket: float
) -> list[Action]:
  scale, bucket = memory.lr_scale, memory.bucket or base_bucket
  if finding.cause == "state":
    rung = 1 + sum(check > memory.checks - LADDER_CHECKS for check in memory.rollbacks)
    if rung >= LADDER:
      return [Stop()]
    return [Rollback(back=int(rung == 3)), *(_slower(scale, LADDER_RATE) if rung > 1 else [])]
  if finding.cause == "learning rate":
    return _slower(scale, CUT)
  if finding.cause == "system":
    return [Stop()] if memory.broken + 1 >= LADDER else []
  room = base_bucket + MOST_SKIPS
  if reading.bucket >= 0.5 * bucket and bucket < room:
    return [SetSkips(min(bucket + MORE_SKIPS, room), bucket)]
  return []


def _slower(scale: float, by: float) -> list[Action]:
  lower = max(LEAST_SCALE, by * scale)
  return [SetLearningRateScale(lower, scale)] if lower < scale else []


def _recover(
  memory: Memory, finding: Finding | None, base_bucket: float
) -> list[tuple[Action, str, float, str]]:
  """Give back what was taken, once the run has been well for some time."""
  if finding is not None or memory.trial is not None or memory.healthy < RECOVER_CHECKS:
    return []
  why = f"{memory.healthy} looks in a row found nothing"
  wanted: list[Action] = []
  if memory.lr_scale < memory.lr_wanted:
    scale = min(memory.lr_wanted, RECOVER * memory.lr_scale)
    wanted.append(SetLearningRateScale(scale, memory.lr_scale))
  if memory.bucket is not None and memory.bucket != base_bucket:
    wanted.append(SetSkips(base_bucket, memory.bucket))
  return [(action, "recovery", 1.0, why) for action in wanted]


def _improve(
  cfg: OrchestratorConfig, memory: Memory, reading: Reading
) -> list[tuple[Action, str, float, str]]:
  """What a healthy run can be given: another use of an expert that has had no tokens for long."""
  looks = lambda at: memory.starved.get(f"{at[0]}/{at[1]}", 0)
  dead = [at for at in reading.starved if looks(at) >= STARVED_CHECKS]
  yes, no = memory.helped["RecycleExpert"]
  waiting = memory.trial is not None or memory.checks < memory.wait.get("RecycleExpert", 0)
  confidence = yes / (yes + no)
  if not dead or waiting or memory.latched or confidence < cfg.confidence:
    return []
  layer, expert = dead[0]
  why = f"expert {expert} of layer {layer} got next to no tokens in {looks(dead[0])} looks"
  return [(RecycleExpert(layer, expert), "router", confidence, why)]


def _judge_trial(
  memory: Memory,
  reading: Reading,
  finding: Finding | None,
  excess: float,
  margin: float,
  *,
  changed: bool,
) -> tuple[Memory, Outcome | None, list[tuple[Action, str, float, str]]]:
  """The verdict on the action on trial, if it is time, and what undoes it."""
  trial = memory.trial
  if trial is None:
    return memory, None, []
  if changed:
    return memory._replace(trial=None), Outcome(trial.id, "unclear", trial.before, math.nan), []
  relapsed = finding is not None and finding.cause == "state"
  if memory.checks < memory.wait["trial"] and not relapsed:
    return memory, None, []
  after = excess if reading.sound else math.inf
  if finding is not None and finding.cause == "data":
    return memory._replace(trial=None), Outcome(trial.id, "unclear", trial.before, after), []
  noise = max(2.0 * margin / MARGIN_SIGMAS, LEAST_HARM)
  works = False
  if isinstance(trial.action, RecycleExpert):
    noise = margin  # it changed nothing when it was done: what comes later is mostly other noise
    at = (trial.action.layer, trial.action.expert)
    works = at not in reading.starved and after <= trial.before + noise
  if after < trial.before - noise or works:
    verdict = "helped"
  elif after > trial.before + noise:
    verdict = "harmed"
  else:
    verdict = "no effect"
  memory = memory._replace(trial=None)
  if trial.requested:
    if isinstance(trial.action, SetLearningRateScale) and verdict == "harmed":
      memory = memory._replace(lr_wanted=trial.action.before)
  else:
    kind = type(trial.action).__name__
    yes, no = memory.helped[kind]
    counts = (yes + 1.0, no) if verdict == "helped" else (yes, no + 1.0)
    gain = min(max(trial.before - after, -1.0), 1.0) if verdict != "no effect" else 0.0
    effects, judged = memory.effects + gain, memory.judged + 1
    harms = memory.harms + 1 if verdict == "harmed" else 0
    memory = memory._replace(
      helped={**memory.helped, kind: counts},
      effects=effects,
      judged=judged,
      harms=harms,
      latched=harms >= LATCH_HARMS or (judged >= LATCH_JUDGED and effects < 0.0),
    )
  back = undo(trial.action) if verdict == "harmed" and reading.sound else None
  why = f"decision {trial.id} cost {after - trial.before:.3g} nats"
  undone = [] if back is None else [(back, "harm", 1.0, why)]
  return memory, Outcome(trial.id, verdict, trial.before, after), undone


def _remember(
  memory: Memory, reading: Reading, finding: Finding | None, excess: float, margin: float
) -> Memory:
  broken = memory.broken + 1 if reading.broken >= BROKEN else 0
  names = [f"{layer}/{expert}" for layer, expert in reading.starved]
  starved = {name: memory.starved.get(name, 0) + 1 for name in names}
  crowded = memory.crowded + 1 if reading.means.get("moe/dropped", 0.0) > CROWDED else 0
  memory = memory._replace(
    learning_rate=reading.learning_rate, broken=broken, starved=starved, crowded=crowded
  )
  if finding is not None:
    turned = finding.cause == "data" and reading.skipped >= SKIPPED
    is_odd = turned or (memory.odd > 0 and finding.cause != "state")
    memory = memory._replace(healthy=0, odd=memory.odd + 1 if is_odd else 0)
    # What lasts longer than the reflex may leave batches out is the data from now on.
    return memory._replace(reference=reading.probe) if is_odd and excess > margin else memory
  memory = memory._replace(healthy=memory.healthy + 1, odd=0)
  if math.isnan(reading.probe):
    return memory
  if memory.reference is None:
    return memory._replace(reference=reading.probe)
  # A rise that the training loss does not share, as of overfitting, is followed, but slowly.
  rise = min(excess, margin)
  spread = memory.spread + 0.1 * (2.0 * max(rise, 0.0) ** 2 - memory.spread)
  return memory._replace(reference=memory.reference + rise, spread=spread)


def _act(
  cfg: OrchestratorConfig, memory: Memory, decision: Decision, step: int, excess: float
) -> Memory:
  """Remember what is done; who only observes remembers that it was said."""
  action, kind = decision.action, type(decision.action).__name__
  memory = memory._replace(decisions=decision.id + 1)
  requested = decision.cause in ("request", "branch")
  is_on_trial = decision.cause not in ("recovery", "harm")
  if is_on_trial and not requested:
    wait = {**memory.wait, kind: memory.checks + WAIT.get(kind, 0)}
    memory = memory._replace(wait=wait, spent=(*memory.spent, step)[-BUDGET:])
  if isinstance(action, Rollback):
    memory = memory._replace(rollbacks=(*memory.rollbacks, memory.checks)[-LADDER:])
  if cfg.mode != "act":
    return memory
  match action:
    case SetLearningRateScale(scale):
      memory = memory._replace(lr_scale=scale, lr_wanted=scale if requested else memory.lr_wanted)
    case SetSkips(bucket):
      memory = memory._replace(bucket=bucket)
    case SetWeightDecay(scale):
      memory = memory._replace(decay_scale=scale)
    case SetExpertDropout(rate):
      memory = memory._replace(expert_dropout=rate)
    case Rollback():
      memory = memory._replace(acted_step=step)
    case _:
      pass
  if is_on_trial and memory.trial is None and not isinstance(action, UNJUDGED):
    before = excess if math.isfinite(excess) else math.inf
    trial = Trial(decision.id, action, step, before, requested)
    wait = {**memory.wait, "trial": memory.checks + HORIZON + 1}
    memory = memory._replace(trial=trial, wait=wait)
  return memory


def _excess(memory: Memory, reading: Reading) -> float:
  """How far the probe's loss is above its reference, nats; 0 if one of them is not known."""
  if not reading.sound:
    return math.inf
  if memory.reference is None or math.isnan(reading.probe):
    return 0.0
  return reading.probe - memory.reference


def _margin(memory: Memory, reading: Reading) -> float:
  before = memory.learning_rate
  rose = before is not None and reading.learning_rate > RATE_ROSE * before
  margin = max(MARGIN, MARGIN_SIGMAS * math.sqrt(memory.spread))
  return WIDER * margin if rose else margin


def _log_odds_outlier(z: float) -> float:
  """How much likelier a standard normal around `z` is than noise with heavy tails, Student's t4."""
  return math.log(0.3989 / 0.375) + 2.5 * math.log1p(z * z / 4.0) if z > 0.0 else 0.0


def _sigmoid(x: float) -> float:
  return 1.0 / (1.0 + math.exp(-x))
