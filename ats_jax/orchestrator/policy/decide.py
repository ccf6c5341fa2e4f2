"""From what was seen to what is done: one pure function of replicated numbers, `decide`.

Every process decides alike, and a ledger of readings gives the same decisions again. What an
invariant shows is certain, and mended at once. Everything else is a suspicion: it starts a
comparison of what could be done from here on, and the run goes on with whatever came out best.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.config.schema import Config, OrchestratorConfig
from ats_jax.orchestrator.actions import (
  Action,
  CorrectStep,
  EndRun,
  FullPrecision,
  Rollback,
  SetLearningRateScale,
  Stop,
)
from ats_jax.orchestrator.constants import (
  BROKEN_STEPS,
  BROKEN_STOP,
  CALM_LOOKS,
  CROWDED_SHARE,
  FIRST_MARGIN,
  FIRST_TURNOVERS,
  HISTORY,
  LADDER_RUNGS,
  LEAST_MARGIN,
  LEAST_SCALE,
  MARGIN_BENDS,
  MOST_REST_LOOKS,
  REST_LOOKS,
  RISEN_RATE,
  SETTLING_LOOKS,
  SLOWER,
  SPAN_LOOKS,
)
from ats_jax.orchestrator.policy import triggers
from ats_jax.orchestrator.policy.state import (
  ANY,
  LASTING,
  MACHINE,
  RISEN,
  TRIED,
  Decision,
  Judgement,
  PolicyState,
  Request,
)
from ats_jax.orchestrator.signals.interval import UNCLEAR, Finding, Reading
from ats_jax.orchestrator.signals.sources import History, Rise, has_other_share, risen_from
from ats_jax.orchestrator.trials.arms import Compared, Proposal, Score
from ats_jax.step.schedule import warmup_steps

BROKEN_ADVICE = (
  "The weights are sound and the newest checkpoint holds them. Look at the batches of these steps "
  "(python -m ats_jax data stats); if they are well, try precision.compute_dtype=float32, "
  "ops.kernels=attention=xla or another machine, and run the same command again."
)
BLAMED = "the same steps led elsewhere when they were made again: a device computes wrongly"
REMEDIES = "damaged weights, too high a learning rate, harmful batches, or other data than before"


class Terms(NamedTuple):
  """What the policy knows of a run.

  Attributes:
    cfg: what is allowed.
    num_steps: of the run.
    warmup: steps of the schedule's.
    peak: the highest learning rate of the schedule.
    capacity: `moe.capacity_factor`; None if nothing is dropped.
    compares: whether there is all that a comparison needs.
    eight_bits: whether layers multiply in 8 bits.
  """

  cfg: OrchestratorConfig
  num_steps: int = 10**9
  warmup: int = 0
  peak: float = 0.0
  capacity: float | None = None
  compares: bool = False
  eight_bits: bool = False

  @classmethod
  def of(cls, cfg: Config) -> "Terms":
    """Those of a run."""
    capacity = cfg.moe.capacity_factor if cfg.moe.dispatch == "capacity" else None
    peak = cfg.optimizer.learning_rate
    return cls(cfg.orchestrator, cfg.num_steps, warmup_steps(cfg), peak, capacity)

  def left(self, policy: PolicyState) -> int:
    """Updates that comparisons may still make."""
    return int(self.cfg.compare_share * self.num_steps) - policy.made_again

  def may_compare(self, policy: PolicyState) -> bool:
    """Whether there is all that a comparison needs, updates for an arm included."""
    return self.compares and self.left(policy) >= SPAN_LOOKS * self.cfg.check_interval


class Interval(NamedTuple):
  """Steps that were looked at.

  Attributes:
    reading: the summary of the steps.
    request: an action that a hook asks for; it is done, or tried, if nothing is wrong.
    evaluated: losses of evaluations of the validation split since the last look.
  """

  reading: Reading
  request: Request | None = None
  evaluated: tuple[float, ...] = ()


def decide(
  terms: Terms, policy: PolicyState, seen: Interval | Compared, step: int
) -> tuple[PolicyState, Judgement]:
  """What to do about what was seen.

  Args:
    terms: facts about the run.
    policy: the state that the last call returned.
    seen: an interval of steps, or what came of a comparison.
    step: at which the actions are applied.
  """
  if isinstance(seen, Compared):
    return _decide_comparison(policy, seen, step)
  return _decide_interval(terms, policy, seen, step)


def _decide_comparison(
  policy: PolicyState, seen: Compared, step: int
) -> tuple[PolicyState, Judgement]:
  """Take over what the best arm has done; a trigger rests if that is waiting."""
  proposal, place = seen.proposal, seen.winner
  policy = policy._replace(made_again=policy.made_again + seen.made)
  rests = {name: rest for name, rest in policy.rests.items() if name not in (ANY, MACHINE)}
  if place is None:
    policy = _rest(policy._replace(rests=rests), proposal.trigger)
    if seen.blames_machine:  # it may compute well a little later
      later = {MACHINE: (REST_LOOKS, policy.looks + REST_LOOKS)}
      policy = policy._replace(rests={**policy.rests, **later})
    # Nothing that could be done was better: what the weights are now is how well they can be.
    elif proposal.trigger == triggers.HELD_OUT and seen.waiting.finite:
      policy = policy._replace(best={**policy.best, **seen.waiting.held})
    return policy, Judgement()
  arm, score = proposal.arms[place], seen.scores[place]
  assert isinstance(score, Score), "it was made"
  rests.pop(proposal.trigger, None)
  losses = [f"{x.loss(proposal.domains):.4g}" for x in (seen.waiting, score)]
  reason = f"{proposal.reason}; it ends at {losses[1]} in place of {losses[0]}"
  if arm.cause == "machine":
    reason = f"the same steps led elsewhere, so a device computed wrongly once; {reason}"
  policy = policy._replace(rests=rests, acted_step=step)
  wanted = [Request(action, arm.cause, reason) for action in arm.actions]
  policy, decisions = _act(policy, wanted, step, applied=True)
  return policy, Judgement(decisions=decisions)


def _decide_interval(
  terms: Terms, policy: PolicyState, seen: Interval, step: int
) -> tuple[PolicyState, Judgement]:
  reading, request, _ = seen
  policy = _follow_evaluations(policy._replace(looks=policy.looks + 1), seen.evaluated)
  if reading.first <= policy.acted_step:
    return policy, Judgement(stale=True)
  if reading.rules != policy.rules:
    # Other rules of the model, such as another capacity or 8 bits, make losses that cannot be
    # compared. A fault in that interval still shows in everything else.
    policy = policy._replace(best={}, history={}, rules=reading.rules)
  policy = _settle(policy, reading)
  margins = {name: _margin(policy.history.get(name, ())) for name in reading.held}
  excess = {name: loss - policy.best.get(name, loss) for name, loss in _domains(reading).items()}
  worse = {name: above for name, above in excess.items() if above > margins[name]}
  is_worse = not reading.sound or bool(worse)
  finding, proposal, wanted = _certain(reading), None, list[Request]()
  may_compare = terms.may_compare(policy)
  rises = _rises(policy, reading, {name: name in worse for name in excess})
  if reading.logits and not policy.logits[1] and reading.step >= _first_steps(terms):
    policy = policy._replace(logits=(reading.step, reading.logits))
  policy = _remember(policy, reading, rises, calm=finding is None and not is_worse)
  is_blamed = finding is None and MACHINE in policy.rests
  finding = Finding("state", BLAMED) if is_blamed else finding
  is_damaged = finding is not None and finding.cause == "state" and (is_worse or _stays(reading))
  is_first = reading.sound or not (policy.rests_from(triggers.DAMAGE) or policy.rollbacks)
  if is_blamed and policy.rests_from(MACHINE):
    pass  # it may compute well a little later
  elif finding is not None and may_compare and (is_blamed or (is_damaged and is_first)):
    proposal = triggers.damaged(finding.reason, at_once=not reading.sound)
  elif finding is not None:
    remedies = _remedies(terms, policy, reading, finding, step, is_damaged=is_damaged)
    wanted = [Request(action, finding.cause, finding.reason) for action in remedies]
    rests = {name: rest for name, rest in policy.rests.items() if name != MACHINE}
    policy = policy._replace(rests=rests) if is_blamed else policy
  elif is_worse:
    proposal = (
      triggers.rose_too_far(policy, reading) if policy.streak("settling")
      else triggers.worse(policy, reading, worse, margins, eight_bits=terms.eight_bits)
    )  # fmt: skip
    finding = _suspicion(policy, proposal)
  elif not policy.rests_from(ANY):
    wanted = _recover(policy)
    if not wanted and request is not None and request.cause != TRIED:
      wanted = [request]
    if not wanted:
      policy, proposal = _well(terms, policy, reading, request, step)
    if proposal is None and not wanted:
      proposal = triggers.unexplained(policy, reading, rises)
      finding = _suspicion(policy, proposal)
  if not wanted and step > terms.warmup and 0 < terms.cfg.patience <= policy.worse_evals:
    reason = f"no lower than {policy.best_eval:.4g} in {policy.worse_evals} evaluations"
    now, before = (("num_steps", step),), (("num_steps", terms.num_steps),)
    wanted.append(Request(EndRun(settings=now, before=before), "patience", reason))
    proposal = None
    policy = policy._replace(worse_evals=0)
  policy, proposal = _allowed(terms, policy, proposal, reading)
  policy, decisions = _act(policy, wanted, step, applied=terms.cfg.mode == "act")
  good = reading.sound and not is_worse and not (finding is not None and finding.certain)
  asks = triggers.more_room(policy, terms.capacity)
  above = max(worse.values(), default=0.0)
  return policy, Judgement(False, good, finding, decisions, proposal, asks, above, rises)


def _domains(reading: Reading) -> dict[str, float]:
  """Losses by domain; where there is only one, that of all text."""
  named = {name: loss for name, loss in reading.held.items() if name}
  return named or dict(reading.held)


def _margin(history: tuple[float, ...]) -> float:
  """Nats of a domain's loss that are noise from look to look."""
  bends = np.abs(np.diff(history, 2))
  if len(bends) < 3:
    return FIRST_MARGIN
  return max(LEAST_MARGIN, MARGIN_BENDS * float(np.median(bends)))


def _settle(policy: PolicyState, reading: Reading) -> PolicyState:
  """A declared rise of the learning rate may cost some loss: nothing is compared for a while.

  Then the reference is taken anew.
  """
  before, best = policy.streak("settling"), policy.best
  left = max(before - 1, 0)
  if not reading.held_steps and reading.applied > RISEN_RATE * policy.best_rate:
    left = SETTLING_LOOKS
    policy = policy._replace(best_rate=reading.applied)
  if before and not left and reading.sound and not _doubts(reading):
    best = {**best, **reading.held}
  return policy._replace(best=best, streaks={**policy.streaks, "settling": left})


def _certain(reading: Reading) -> Finding | None:
  """What an invariant shows, if anything."""
  if not reading.sound:
    why = f"{_doubts(reading)}; " if _doubts(reading) else ""
    reason = f"{why}weights or their held-out loss ({reading.probe}) are not finite"
    return Finding("state", reason)
  if reading.faults:
    return reading.faults[0]
  if doubts := _doubts(reading):
    return Finding("state", f"{doubts}; held-out loss {reading.probe:.4g}")
  if reading.broken >= BROKEN_STEPS:
    steps = f"no loss or gradient was finite in the last {reading.broken} steps"
    return Finding("system", f"{steps}, though the weights are")
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


def _stays(reading: Reading) -> bool:
  """Whether the state holds what no update mends: copies that differ."""
  return any(fault.cause == "state" for fault in reading.faults)


def _suspicion(policy: PolicyState, proposal: Proposal | None) -> Finding | None:
  """Said once: while its trigger rests, it has been looked into."""
  if proposal is None or policy.rests_from(proposal.trigger):
    return None
  return Finding(UNCLEAR, f"{proposal.reason}: {REMEDIES}")


def _remedies(
  terms: Terms,
  policy: PolicyState,
  reading: Reading,
  finding: Finding,
  step: int,
  *,
  is_damaged: bool,
) -> list[Action]:
  if finding.advice:
    return [Stop(finding.advice)]
  if finding.cause == "count":
    return [CorrectStep(step)]
  if finding.cause == "system" and terms.eight_bits:
    return [FullPrecision()]
  if finding.cause == "system":
    return [Stop(BROKEN_ADVICE)] if reading.broken >= BROKEN_STOP else []
  if not is_damaged:
    return []  # it is mended, or harmless: going back would cost more
  rung = 1 + policy.rollbacks
  if rung >= LADDER_RUNGS:
    return [Stop()]
  scale = max(LEAST_SCALE, SLOWER * policy.lr_scale)
  slower = [SetLearningRateScale(scale, policy.lr_scale)] if rung > 1 else []
  return [Rollback(back=int(rung == 3)), *slower]


def _recover(policy: PolicyState) -> list[Request]:
  """Lift a cut of the rate, once the run has been well for some time."""
  calm = policy.streak("calm")
  if policy.lr_scale >= policy.lr_wanted or calm < CALM_LOOKS:
    return []
  scale = min(policy.lr_wanted, policy.lr_scale / SLOWER)
  why = f"{calm} looks in a row found nothing"
  return [Request(SetLearningRateScale(scale, policy.lr_scale), "recovery", why)]


def _well(
  terms: Terms, policy: PolicyState, reading: Reading, request: Request | None, step: int
) -> tuple[PolicyState, Proposal | None]:
  """What may be tried in a run that is well."""
  policy, proposal = _judge_start(terms, policy, reading, step)
  if proposal is not None:
    return policy, proposal
  if request is not None:
    return policy, triggers.asked_for(request.action)
  if (proposal := triggers.dead_expert(policy, reading)) is not None:
    return policy, proposal
  if terms.cfg.raise_learning_rate and "" in policy.history:
    return policy, triggers.higher_rate(policy, reading, terms.peak)
  return policy, None


def _judge_start(
  terms: Terms, policy: PolicyState, reading: Reading, step: int
) -> tuple[PolicyState, Proposal | None]:
  """Whether the first rate is too high: once, when it shows or can be mended for the last time."""
  if policy.start is None:
    return policy, None
  left, is_over = terms.left(policy), reading.step >= _first_steps(terms)
  proposal = triggers.too_fast(policy, policy.start[1])
  if policy.acted_step or step > left:  # what changed the state since would be lost
    is_over, proposal = True, None
  elif proposal is not None:
    shows = reading.step >= terms.warmup and step * policy.start[1] >= FIRST_TURNOVERS
    is_over = shows or step + terms.cfg.check_interval > left
  return (policy._replace(start=None), proposal) if is_over else (policy, None)


def _first_steps(terms: Terms) -> int:
  """Steps in which nothing is usual yet."""
  return max(terms.warmup, SETTLING_LOOKS * terms.cfg.check_interval)


def _allowed(
  terms: Terms, policy: PolicyState, proposal: Proposal | None, reading: Reading
) -> tuple[PolicyState, Proposal | None]:
  """Whether there is time for a comparison; one at a time, and within its share of the run."""
  if proposal is None or policy.rests_from(proposal.trigger):
    return policy, None
  if terms.may_compare(policy):
    until = policy.looks + SPAN_LOOKS + 1  # then it has ended, or was given up
    return policy._replace(rests={**policy.rests, ANY: (0, until)}), proposal
  policy = _rest(policy, proposal.trigger)
  if proposal.trigger == triggers.HELD_OUT and terms.cfg.mode == "act":
    # It was said. Snapshots of what is now are better than none.
    policy = policy._replace(best={**policy.best, **reading.held})
  return policy, None


def _rest(policy: PolicyState, trigger: str) -> PolicyState:
  """No comparison by a trigger for some looks, twice as many the next time."""
  looks, _ = policy.rests.get(trigger, (REST_LOOKS, 0))
  rest = min(2 * looks, MOST_REST_LOOKS), policy.looks + looks
  return policy._replace(rests={**policy.rests, trigger: rest})


def _rises(policy: PolicyState, reading: Reading, worse: Mapping[str, bool]) -> tuple[Rise, ...]:
  """Sources whose training loss has risen, unless a declared rise of the rate may be why."""
  if policy.streak("settling"):
    return ()
  before = lambda name: policy.sources.get(name, ())
  found = {name: risen_from(before(name), now) for name, now in reading.sources.items()}
  return tuple(
    Rise(name, reading.sources[name].loss, usual, worse.get(name))
    for name, usual in found.items()
    if usual is not None
  )


def _histories(policy: PolicyState, reading: Reading, rises: Sequence[Rise]) -> dict[str, History]:
  """Of the sources, with this look: what has risen begins anew if it stays so."""
  histories, rose = dict(policy.sources), {rise.source for rise in rises}
  for name, now in reading.sources.items():
    history, look = histories.get(name, ()), ((now.loss, now.share),)
    if name not in rose:
      anew = bool(history) and has_other_share(history, now)
      histories[name] = look if anew else (*history, *look)[-HISTORY:]
    elif policy.streak(RISEN + name) >= SETTLING_LOOKS:
      histories[name] = look
  return histories


def _remember(
  policy: PolicyState, reading: Reading, rises: Sequence[Rise], *, calm: bool
) -> PolicyState:
  crowded = reading.means.get("moe/dropped", 0.0) > CROWDED_SHARE
  hold = {f"{layer}/{expert}" for layer, expert in reading.starved}
  hold |= {RISEN + rise.source for rise in rises}
  hold |= {name for name, holds in (("calm", calm), ("crowded", crowded)) if holds}
  streaks = {name: policy.streak(name) + 1 for name in sorted(hold)}
  if left := policy.streak("settling"):
    streaks["settling"] = left
  history, best = dict(policy.history), dict(policy.best)
  for name, loss in reading.held.items():
    if math.isfinite(loss):
      history[name] = (*history.get(name, ()), loss)[-HISTORY:]
    if calm and loss <= best.get(name, math.inf):
      best[name] = loss
  rate = reading.applied if calm else policy.best_rate
  return policy._replace(
    sources=_histories(policy, reading, rises), start=_start(policy, reading),
    streaks=streaks, history=history, best=best, best_rate=rate,
  )  # fmt: skip


def _follow_evaluations(policy: PolicyState, losses: tuple[float, ...]) -> PolicyState:
  for loss in losses:
    worse = policy._replace(worse_evals=policy.worse_evals + 1)
    policy = policy._replace(best_eval=loss, worse_evals=0) if loss < policy.best_eval else worse
  return policy


def _start(policy: PolicyState, reading: Reading) -> tuple[float, float] | None:
  """Follow the relative size of updates, until the start is judged."""
  norm, turnover = policy.start or (0.0, 0.0)
  norm = reading.norm if reading.first == 1 else norm  # else a resumed run: it is not known
  return (norm, max(turnover, reading.fastest / norm)) if norm else None


def _act(
  policy: PolicyState, wanted: list[Request], step: int, *, applied: bool
) -> tuple[PolicyState, tuple[Decision, ...]]:
  """Remember what is decided; in mode "observe" only that it was, as nothing is carried out."""
  first = policy.decisions
  decisions = tuple(Decision(first + place, *parts) for place, parts in enumerate(wanted))
  policy = policy._replace(decisions=first + len(decisions))
  for decision in decisions:
    if isinstance(decision.action, Rollback):
      policy = policy._replace(ladder=(*policy.ladder, policy.looks)[-LADDER_RUNGS:])
    if applied:
      lasts = decision.cause in LASTING
      policy = decision.action.remember(policy, step, wanted=lasts)
  return policy, decisions
