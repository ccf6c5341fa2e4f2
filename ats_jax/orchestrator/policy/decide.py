"""From what was seen to what is done: one pure function of replicated numbers, `decide`.

Every process decides alike, and a ledger of readings gives the same decisions again. One action at
a time is on trial. Its effect is measured on the probe batch; what did harm is undone, and a policy
that does harm twice only watches from then on.

The order of the questions is that of their cost. Is the state broken, or worse than it was on a
batch that never changes? Then the state is at fault. Is only the training loss high? Then the data
is: nothing is rolled back. The learning rate comes last, as cutting it lasts.
"""

import math
from typing import NamedTuple

from ats_jax.config.schema import Config, OrchestratorConfig
from ats_jax.orchestrator.actions import (
  Action,
  CorrectStep,
  RecycleExpert,
  Rollback,
  SetLearningRateScale,
  SetSkips,
  Stop,
)
from ats_jax.orchestrator.policy.growth import helps, higher_rate, more_room, rate_won
from ats_jax.orchestrator.policy.rates import SURPRISES, lower_rate_won, propose_trial, watch_start
from ats_jax.orchestrator.policy.state import (
  REQUESTED,
  Decision,
  Finding,
  Judgement,
  Outcome,
  PolicyState,
  Request,
  Trial,
)
from ats_jax.orchestrator.signals.interval import Reading
from ats_jax.orchestrator.trials.paired import Effect
from ats_jax.step.schedule import warmup_steps

# The margin: how far the probe's loss may be above its reference.
LEAST_MARGIN = 0.02  # nats that the margin has at least
MARGIN_SIGMAS = 5.0  # standard deviations of the probe's loss between looks
REFERENCE_MARGINS = 2.0  # margins above the reference, from which on no look widens the margin
RAISED_RATE = 1.1  # times the rate at the reference, from which on the loss may rise for a while
RAISED_RATE_MARGINS = 2.0  # margins that are allowed then
# From here on the signals of the reflex are an alarm.
CUSUM_ALARM = 20.0  # sigmas; false alarms below one in two hundred runs of 20,000 clean steps
BROKEN_STEPS = 8  # steps in a row whose loss or gradient is not finite
HELD_STEPS = 20  # steps in a row whose learning rate is held
RISING_SIGMAS = 2.0  # of the loss in the last steps, without which an old CUSUM is no alarm
BROKEN_STOP = 200  # steps in a row, whatever the interval of looks: a fault may pass
BROKEN_ADVICE = (
  "The weights are sound and the newest checkpoint holds them. Look at the batches of these steps "
  "(python -m ats_jax data stats); if they are well, try precision.compute_dtype=float32, "
  "ops.kernels=attention=xla or another machine, and run the same command again."
)
PRIOR_ODDS = -math.log(2000.0)  # log odds of a fault in an interval
MOST_EVIDENCE = 12.0  # log odds that a CUSUM adds at most
JUDGED_AFTER_LOOKS = 2  # looks after an action, at which it is judged
CROWDED_SHARE = 0.3  # share of dropped choices, from which on experts have too little room
STARVED_CHECKS = 10  # looks in a row without tokens, after which an expert is dead
ACTION_BUDGET = 3  # actions of the policy in BUDGET_STEPS
BUDGET_STEPS = 1000  # steps in which the policy takes ACTION_BUDGET actions at most
LADDER_RUNGS = 4  # which rollback in LADDER_LOOKS is a stop
LADDER_LOOKS = 8  # looks within which rollbacks are counted
LADDER_RATE_FACTOR = 0.6  # of the learning rate, with each rollback from the second on
LEAST_SCALE = 1e-3  # of the learning rate
RECOVERY_FACTOR = 1.1  # of the learning rate, at each look of a recovery
RECOVERY_LOOKS = 5  # looks in a row that found nothing, after which a recovery begins
LATCH_HARMS = 2  # harmful actions in a row, after which the policy takes no others
LATCH_JUDGED = 5  # judged actions after which it takes none if they did harm in sum
LEAST_HARM = 0.005  # nats of the probe's loss, below which nothing is called harm
ROLLBACK = Rollback.__name__

Wanted = tuple[Action, str, float, str]  # action, cause, confidence and reason of a decision


class Terms(NamedTuple):
  """What the policy knows of a run.

  Attributes:
    cfg: the thresholds, and whether actions are applied.
    warmup: steps of the schedule's.
    capacity: `moe.capacity_factor`; None if nothing is dropped.
  """

  cfg: OrchestratorConfig
  warmup: int = 0
  capacity: float | None = None

  @classmethod
  def of(cls, cfg: Config) -> "Terms":
    """Those of a run."""
    capacity = cfg.moe.capacity_factor if cfg.moe.dispatch == "capacity" else None
    return cls(cfg.orchestrator, warmup_steps(cfg), capacity)


class Interval(NamedTuple):
  """Steps that were looked at.

  Attributes:
    reading: the summary of the steps.
    pause: whether the loop waits anyway, as before a checkpoint: there is time for surgery.
    request: an action that a hook asks for; it is done if nothing is wrong and none is on trial.
  """

  reading: Reading
  pause: bool = False
  request: Request | None = None


class Tried(NamedTuple):
  """An action that was tried on the same updates.

  Attributes:
    action: the action that was tried.
    effect: the difference that it made.
    again: on steps made again, so that the run can go on with them; or ahead.
  """

  action: Action
  effect: Effect
  again: bool


def decide(
  terms: Terms, policy: PolicyState, seen: Interval | Tried, step: int
) -> tuple[PolicyState, Judgement]:
  """What to do about what was seen.

  Args:
    terms: facts about the run.
    policy: the state that the last call returned.
    seen: an interval of steps, or what came of a trial.
    step: at which the actions are applied.
  """
  if isinstance(seen, Tried):
    return _decide_trial(terms, policy, seen, step)
  policy, judgement = _decide_interval(terms, policy, seen, step)
  policy, tries = higher_rate(policy, seen.reading, judgement)
  tries = tries if terms.cfg.raise_learning_rate else None
  if not (judgement.stale or judgement.decisions):
    span = (terms.warmup, terms.cfg.check_interval)
    policy, diagnosis = propose_trial(policy, seen.reading, judgement.finding, *span)
    judgement = judgement._replace(past=diagnosis.past)
    tries = diagnosis.coming or tries
  return policy, judgement._replace(tries=tries, asks=more_room(policy, terms.capacity))


def _decide_trial(
  terms: Terms, policy: PolicyState, tried: Tried, step: int
) -> tuple[PolicyState, Judgement]:
  """Adopt an action that won: at once if its arm can go on as the run, else as a request."""
  action, effect = tried.action, tried.effect
  if not tried.again:
    reason = f"on a branch the held-out loss changed by {-effect.gain:.3g} +- {effect.error:.2g}"
    return policy, Judgement(asks=Request(action, "branch", reason) if helps(effect) else None)
  raises = isinstance(action, SetLearningRateScale) and action.scale > action.before
  if raises:
    policy, confidence = rate_won(terms.cfg, policy, effect)
  else:
    policy, has_won = lower_rate_won(policy, action, effect)
    confidence = 1.0 if has_won else None
  if confidence is None:
    return policy, Judgement()
  reason = (
    f"the same steps with it took the held-out loss from {effect.before:.4g} to "
    f"{effect.changed:.4g} instead of {effect.without:.4g}"
  )
  cause = "plateau" if raises else "data" if isinstance(action, SetSkips) else "learning rate"
  decision = Decision(policy.decisions, action, cause, confidence, reason)
  policy = action.remember(policy, step, wanted=True)
  policy = policy._replace(decisions=policy.decisions + 1, acted_step=step)
  return policy, Judgement(decisions=(decision,))


def _decide_interval(
  terms: Terms, policy: PolicyState, seen: Interval, step: int
) -> tuple[PolicyState, Judgement]:
  """Judge the last action, find what is wrong now, and say what to do about it."""
  cfg, (reading, pause, request) = terms.cfg, seen
  policy = watch_start(policy._replace(checks=policy.checks + 1), reading)
  if reading.first <= policy.acted_step:
    return policy, Judgement(stale=True)
  # Under other rules (8 bits switched off, `mod.capacity` a rung lower) the probe scores another
  # model, whose loss cannot be compared with earlier ones. Earlier weights cannot be scored by the
  # new rules either: their thresholds belong to the capacity that they were trained with. So the
  # reference is taken anew at the first look that finds nothing, and an action on trial stays
  # unjudged. A fault in that interval still shows in everything but the probe.
  changed = reading.rules != policy.rules
  if changed:
    policy = policy._replace(reference=None, last_probe=None, last_change=None, rules=reading.rules)
  finding = diagnose(policy, reading)
  excess = _excess(policy, reading)
  margin = _margin(policy, reading)
  requested = policy.trial is not None and policy.trial.requested
  judged = _judge_trial(policy, reading, finding, excess, margin, changed=changed)
  policy, outcome, undone = judged
  wanted = (
    []
    if finding is None
    else _remedy(cfg, policy, reading, finding, step, is_worse=excess > margin)
  )
  policy = _remember(policy, reading, finding, excess, margin)
  if requested or (finding is not None and finding.certain):
    # The action may have broken the state: undo it and mend the fault. A rollback undoes edits.
    rolls_back = any(action.needs_saved for action, *_ in wanted)
    wanted += [part for part in undone if not (rolls_back and part[0].edits)]
  else:
    wanted = undone or wanted
  wanted = wanted or _recover(policy, finding)
  if request is not None and not wanted and finding is None and policy.trial is None:
    wanted = [(request.action, request.cause, 1.0, request.reason)]
  if pause and not wanted and finding is None:
    wanted = _improve(cfg, policy, reading)
  decisions = tuple(Decision(policy.decisions + i, *parts) for i, parts in enumerate(wanted))
  for decision in decisions:
    policy = _act(cfg, policy, decision, step, excess)
  doubted = finding is not None and finding.certain
  good = reading.sound and not excess > margin and not doubted
  return policy, Judgement(False, good, finding, outcome, decisions)


def diagnose(policy: PolicyState, reading: Reading) -> Finding | None:
  """What is wrong, if anything."""
  excess, margin = _excess(policy, reading), _margin(policy, reading)
  probe = f"held-out loss {reading.probe:.4g}, {excess:+.3g} from when all was well"
  if not reading.sound:
    why = f"{_doubts(reading)}; " if _doubts(reading) else ""
    reason = f"{why}weights or their held-out loss ({reading.probe}) are not finite"
    return Finding("state", 1.0, True, reason)
  for fault in reading.faults:
    return Finding(fault.cause, 1.0, True, fault.reason)
  if doubts := _doubts(reading):
    return Finding("state", 1.0, True, f"{doubts}; {probe}")
  if reading.broken >= BROKEN_STEPS:
    steps = f"no loss or gradient was finite in the last {reading.broken} steps"
    return Finding("system", 1.0, True, f"{steps}, though the weights are: {probe}")
  is_worse, is_held = excess > margin, reading.held >= HELD_STEPS
  # The CUSUM remembers long: a rise that the statistics have taken in by now is no surprise.
  rising = reading.cusum > CUSUM_ALARM and reading.recent_z > RISING_SIGMAS
  surprised = rising or reading.surprising >= SURPRISES
  fault = _sigmoid(PRIOR_ODDS + min(reading.cusum / 2.0, MOST_EVIDENCE))
  worse = _sigmoid(_log_odds_outlier(MARGIN_SIGMAS * excess / margin))
  held = f"the learning rate rises too fast, the last {reading.held} steps had it held"
  if is_worse and policy.odd and not surprised:
    reason = f"{probe}, after {policy.odd} looks at odd batches: the weights follow other data"
    return Finding("data", fault, False, reason)
  if is_worse and is_held:
    return Finding("learning rate", worse, False, f"{held}; {probe}")
  if surprised:
    reason = f"training loss {_raised(reading)}; {probe}: the batches are odd, not the weights"
    return Finding("data", fault, False, reason)
  if is_worse and reading.surprising:
    return Finding("data", 0.0, False, f"{probe}, after {reading.surprising} surprising batches")
  if is_worse:
    why = "and nothing odd in the batches: too high a rate, or it learns them by heart"
    return Finding("learning rate", 0.0, False, f"{probe}, {why}")
  if is_held:
    return Finding("learning rate", 0.0, False, f"{held}, which is enough: {probe}")
  return None


def _doubts(reading: Reading) -> str:
  """Why the weights may be corrupt; "" = there is no reason."""
  if reading.miscounted:
    return f"the optimizer's count of updates was off by {reading.miscounted}; it is mended"
  if not reading.wrong:
    return ""
  return (
    f"{reading.tensor} or its moments hold what no update can have left there: something else "
    "wrote to their memory"
  )


def _raised(reading: Reading) -> str:
  return (
    f"{reading.loss:.4g}, evidence of a rise {reading.cusum:.3g} (alarm at {CUSUM_ALARM:g}), "
    f"{reading.surprising} surprising batches, {reading.skipped} left out"
  )


def _remedy(
  cfg: OrchestratorConfig,
  policy: PolicyState,
  reading: Reading,
  finding: Finding,
  step: int,
  *,
  is_worse: bool,
) -> list[Wanted]:
  """What would help, if it is allowed."""
  actions = _candidates(policy, reading, finding, step, is_worse=is_worse)
  if not actions:
    return []
  kind = type(actions[0])
  yes, no = policy.chances(kind)
  confidence = 1.0 if finding.certain else finding.confidence * yes / (yes + no)
  recent = [s for s in policy.spent if s > reading.step - BUDGET_STEPS]
  spent = len(recent) >= ACTION_BUDGET
  if finding.certain:
    actions = [Stop()] if policy.latched else actions
  elif policy.latched or confidence < cfg.confidence or policy.waits(kind) or spent:
    return []
  return [(action, finding.cause, confidence, finding.reason) for action in actions]


def _candidates(
  policy: PolicyState, reading: Reading, finding: Finding, step: int, *, is_worse: bool
) -> list[Action]:
  scale = policy.lr_scale
  for fault in reading.faults:
    if fault.advice and fault.reason == finding.reason:
      return [Stop(fault.advice)]
  if finding.cause == "count":
    return [CorrectStep(step)]
  if finding.cause == "state":
    if not is_worse:  # mended, or harmless: a rollback would cost more
      return []
    rung = 1 + sum(check > policy.checks - LADDER_LOOKS for check in policy.made.get(ROLLBACK, ()))
    if rung >= LADDER_RUNGS:
      return [Stop()]
    return [
      Rollback(back=int(rung == 3)),
      *(_slower(scale, LADDER_RATE_FACTOR) if rung > 1 else []),
    ]
  if finding.cause == "learning rate" and policy.reference_rate and reading.learning_rate:
    return _slower(scale, policy.reference_rate / reading.learning_rate / scale)
  if finding.cause == "system":
    return [Stop(BROKEN_ADVICE)] if reading.broken >= BROKEN_STOP else []
  return []


def _slower(scale: float, by: float) -> list[Action]:
  lower = max(LEAST_SCALE, by * scale)
  return [SetLearningRateScale(lower, scale)] if lower < scale else []


def _recover(policy: PolicyState, finding: Finding | None) -> list[Wanted]:
  """Lift cuts of the rate and skips, once the run has been well for some time."""
  if finding is not None or policy.trial is not None or policy.healthy < RECOVERY_LOOKS:
    return []
  why = f"{policy.healthy} looks in a row found nothing"
  wanted: list[Action] = []
  if policy.lr_scale < policy.lr_wanted:
    scale = min(policy.lr_wanted, RECOVERY_FACTOR * policy.lr_scale)
    wanted.append(SetLearningRateScale(scale, policy.lr_scale))
  if bucket := policy.control["bucket"]:
    wanted.append(SetSkips(0.0, bucket))
  return [(action, "recovery", 1.0, why) for action in wanted]


def _improve(cfg: OrchestratorConfig, policy: PolicyState, reading: Reading) -> list[Wanted]:
  """Improve a healthy run: recycle an expert that has had no tokens for long."""
  looks = lambda at: policy.starved.get(f"{at[0]}/{at[1]}", 0)
  dead = [at for at in reading.starved if looks(at) >= STARVED_CHECKS]
  yes, no = policy.chances(RecycleExpert)
  confidence = yes / (yes + no)
  if not dead or policy.waits(RecycleExpert) or policy.latched or confidence < cfg.confidence:
    return []
  layer, expert = dead[0]
  why = f"expert {expert} of layer {layer} got next to no tokens in {looks(dead[0])} looks"
  return [(RecycleExpert(layer, expert), "router", confidence, why)]


def _judge_trial(
  policy: PolicyState,
  reading: Reading,
  finding: Finding | None,
  excess: float,
  margin: float,
  *,
  changed: bool,
) -> tuple[PolicyState, Outcome | None, list[Wanted]]:
  """Judge the action on trial, if it is time; returns what undoes it if it did harm."""
  trial = policy.trial
  if trial is None:
    return policy, None, []
  if changed:
    return policy._replace(trial=None), Outcome(trial.id, "unclear", trial.before, math.nan), []
  relapsed = finding is not None and finding.cause == "state"
  if policy.checks < policy.wait["trial"] and not relapsed:
    return policy, None, []
  after = excess if reading.sound else math.inf
  if finding is not None and finding.cause == "data":
    return policy._replace(trial=None), Outcome(trial.id, "unclear", trial.before, after), []
  noise = margin if trial.action.exact else max(2.0 * margin / MARGIN_SIGMAS, LEAST_HARM)
  works = trial.action.worked(reading) and after <= trial.before + noise
  if after < trial.before - noise or works:
    verdict = "helped"
  elif after > max(trial.before, 0.0) + noise:  # at or below the reference nothing is harm
    verdict = "harmed"
  else:
    verdict = "no effect"
  policy = policy._replace(trial=None)
  if trial.requested:
    policy = trial.action.retract(policy) if verdict == "harmed" else policy
  else:
    kind = type(trial.action)
    yes, no = policy.chances(kind)
    counts = (yes + 1.0, no) if verdict == "helped" else (yes, no + 1.0)
    gain = min(max(trial.before - after, -1.0), 1.0) if verdict != "no effect" else 0.0
    effects, judged = policy.effects + gain, policy.judged + 1
    harms = policy.harms + 1 if verdict == "harmed" else 0
    policy = policy._replace(
      helped={**policy.helped, kind.__name__: counts},
      effects=effects,
      judged=judged,
      harms=harms,
      latched=harms >= LATCH_HARMS or (judged >= LATCH_JUDGED and effects < 0.0),
    )
  # An undo must not restore a state or a rate that was found bad.
  may_undo = verdict == "harmed" and reading.sound and trial.cause not in ("state", "learning rate")
  back = trial.action.undo() if may_undo else None
  why = f"decision {trial.id} cost {after - trial.before:.3g} nats"
  undone = [] if back is None else [(back, "harm", 1.0, why)]
  return policy, Outcome(trial.id, verdict, trial.before, after), undone


def _remember(
  policy: PolicyState, reading: Reading, finding: Finding | None, excess: float, margin: float
) -> PolicyState:
  names = [f"{layer}/{expert}" for layer, expert in reading.starved]
  starved = {name: policy.starved.get(name, 0) + 1 for name in names}
  crowded = policy.crowded + 1 if reading.means.get("moe/dropped", 0.0) > CROWDED_SHARE else 0
  policy = policy._replace(
    learning_rate=reading.learning_rate,
    starved=starved,
    crowded=crowded,
  )
  if not math.isnan(reading.probe) and not (finding and finding.certain):
    policy = _spread(policy, reading.probe)
  if finding is not None:
    # Divergence makes the probe worse with the first high training loss; other data does not.
    shown = reading.surprising >= SURPRISES or excess <= margin
    turned = finding.cause == "data" and shown
    is_odd = turned or (policy.odd > 0 and finding.cause != "state")
    policy = policy._replace(healthy=0, odd=policy.odd + 1 if is_odd else 0)
    # The weights follow the odd data, which makes the probe worse: so does the reference.
    return policy._replace(reference=reading.probe) if is_odd and excess > margin else policy
  policy = policy._replace(healthy=policy.healthy + 1, odd=0)
  if math.isnan(reading.probe):
    return policy
  if policy.reference is None or excess <= 0.0:
    return policy._replace(reference=reading.probe, reference_rate=reading.applied)
  return policy  # the reference never rises, or a slow decline would go unnoticed


def _spread(policy: PolicyState, probe: float) -> PolicyState:
  """Update the spread of the probe's loss, from how much more it falls than a look before.

  Neither a descent that levels off nor a run far above its reference widens the margin.
  """
  margin, before = _usual_margin(policy), policy.last_change
  change = None if policy.last_probe is None else probe - policy.last_probe
  policy = policy._replace(last_probe=probe, last_change=change)
  is_far = policy.reference is not None and probe > policy.reference + REFERENCE_MARGINS * margin
  if is_far or change is None or before is None:
    return policy
  # Times 2: only the negative half counts. Over 3: a second difference has thrice the variance.
  bend = min(max(before - change, 0.0), margin)
  return policy._replace(spread=policy.spread + 0.1 * (2.0 * bend**2 / 3.0 - policy.spread))


def _act(
  cfg: OrchestratorConfig, policy: PolicyState, decision: Decision, step: int, excess: float
) -> PolicyState:
  """Remember a decision; in mode "observe" only that it was made, as nothing is carried out."""
  action, kind = decision.action, type(decision.action).__name__
  made = (*policy.made.get(kind, ()), policy.checks)[-LADDER_RUNGS:]
  policy = policy._replace(decisions=decision.id + 1, made={**policy.made, kind: made})
  requested = decision.cause in REQUESTED
  is_on_trial = decision.cause not in ("recovery", "harm")
  if is_on_trial and not requested:
    wait = {**policy.wait, kind: policy.checks + action.cooldown}
    policy = policy._replace(wait=wait, spent=(*policy.spent, step)[-ACTION_BUDGET:])
  if cfg.mode != "act":
    return policy
  policy = action.remember(policy, step, wanted=requested)
  if is_on_trial and policy.trial is None and action.judged:
    before = excess if math.isfinite(excess) else math.inf
    trial = Trial(decision.id, action, step, before, decision.cause)
    wait = {**policy.wait, "trial": policy.checks + JUDGED_AFTER_LOOKS + 1}
    policy = policy._replace(trial=trial, wait=wait)
  return policy


def _excess(policy: PolicyState, reading: Reading) -> float:
  """How far the probe's loss is above its reference, nats; 0 if one of them is not known."""
  if not reading.sound:
    return math.inf
  if policy.reference is None or math.isnan(reading.probe):
    return 0.0
  return reading.probe - policy.reference


def _margin(policy: PolicyState, reading: Reading) -> float:
  rose = reading.applied > RAISED_RATE * policy.reference_rate > 0.0
  return RAISED_RATE_MARGINS * _usual_margin(policy) if rose else _usual_margin(policy)


def _usual_margin(policy: PolicyState) -> float:
  return max(LEAST_MARGIN, MARGIN_SIGMAS * math.sqrt(policy.spread))


def _log_odds_outlier(z: float) -> float:
  """How much likelier a standard normal around `z` is than noise with heavy tails, Student's t4."""
  return math.log(0.3989 / 0.375) + 2.5 * math.log1p(z * z / 4.0) if z > 0.0 else 0.0


def _sigmoid(x: float) -> float:
  return 1.0 / (1.0 + math.exp(-x))
