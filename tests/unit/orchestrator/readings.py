"""Readings as a run would give them, for tests of what is made of them."""

import math
from typing import Any

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.signals.interval import Finding, Reading

INTERVAL = 10
ACT = OrchestratorConfig(mode="act", check_interval=INTERVAL)
MEANS = {"train/loss": 2.0}
HEALTHY: dict[str, Any] = dict(
  loss=2.0, probe=2.0, sound=True, nonfinite=0, broken=0,
  held_steps=0, learning_rate=1e-3, applied=1e-3, means=MEANS, norm=10.0, fastest=0.01,
)  # fmt: skip
# What each fault looks like; with a held-out loss of 2 before it.
NAN_STATE = dict(sound=False, probe=math.nan, nonfinite=10, broken=10)
EDITED = dict(wrong=1, tensor="layers/0/attn/q")  # and no harm done
BAD_STATE = EDITED | dict(probe=5.0, loss=5.0)
WORSE = dict(probe=2.5)
BAD_DATA = dict(loss=5.0)
UNEQUAL_COPIES = dict(faults=(Finding("state", "the copies of head/weight are not equal"),))
NAN_GRADIENT = dict(nonfinite=10, broken=10, loss=math.nan)


def reading(number: int, **changes: Any) -> Reading:
  """The `number`-th interval of a run, from 0; `probe` is the loss on all held-out text."""
  fields = {**HEALTHY, **changes}
  probe = fields.pop("probe")
  held = {} if probe is None else {"": probe}
  fields.setdefault("held", held)
  return Reading(first=number * INTERVAL + 1, step=(number + 1) * INTERVAL, **fields)


class Looks:
  """A policy that is shown one reading after another, each an interval late."""

  def __init__(self, cfg=ACT, **terms):
    self.terms = Terms(cfg, **{"compares": cfg.mode == "act", "peak": 1e-3, **terms})
    self.policy, self.number, self.judgements = PolicyState(), 0, []

  def __call__(self, times=1, request=None, evaluated=(), **changes):
    for _ in range(times):
      seen = Interval(reading(self.number, **changes), request, evaluated)
      step = seen.reading.step + INTERVAL
      self.policy, judgement = decide(self.terms, self.policy, seen, step)
      self.judgements.append(judgement)
      self.number += 1
    return self.judgements[-1]

  def compared(self, compared):
    """Tell it what came of a comparison, at the step of the last look."""
    step = (self.number + 1) * INTERVAL
    self.policy, judgement = decide(self.terms, self.policy, compared, step)
    self.judgements.append(judgement)
    return judgement

  @property
  def actions(self):
    return [d.action for judgement in self.judgements for d in judgement.decisions]

  @property
  def proposals(self):
    return [j.proposal for j in self.judgements if j.proposal is not None]
