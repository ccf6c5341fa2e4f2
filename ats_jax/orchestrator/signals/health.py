"""How a run is doing, in one word and its causes."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ats_jax.orchestrator.constants import CHANGE_TIMES, LARGE_LOGIT, LOGIT_GROWTH
from ats_jax.orchestrator.signals.interval import Finding

LEVELS = ("healthy", "warning", "critical")


class Cause(NamedTuple):
  """Something worth a word.

  Attributes:
    name: the same as long as it lasts.
    level: an index of `LEVELS`.
    says: in words.
  """

  name: str
  level: int
  says: str


class Health(NamedTuple):
  """A report.

  Attributes:
    level: one of `LEVELS`.
    causes: the causes of the level, in words, the worst first.
    names: names of the causes (`Cause.name`).
    levels: levels of the causes.
  """

  level: str
  causes: tuple[str, ...]
  names: tuple[str, ...] = ()
  levels: tuple[int, ...] = ()


class Limit(NamedTuple):
  """When a mean over an interval is worth a word.

  Attributes:
    metric: name of the metric.
    warning: from here on.
    critical: from here on; infinite if it never is.
    says: what a value beyond the limit means, in words.
    low: small values are the bad ones.
  """

  metric: str
  warning: float
  critical: float
  says: str
  low: bool = False

  def level(self, value: float) -> int:
    """Of a value, as an index of `LEVELS`; 0 of what is not known."""
    sign = -1.0 if self.low else 1.0
    return sum(sign * value >= sign * bound for bound in (self.warning, self.critical))


# Runs without sparse layers lack the metrics of those. Sources: MaxVio arXiv:2408.15664; logits of
# size 50 are where bfloat16 resolves 0.25 (so z about 2500); predictors of MoD arXiv:2404.02258.
LIMITS = (
  Limit("train/z", 100.0, 2500.0, "the logits grow (step.z_loss holds them)"),
  Limit("reflex/skipped", 0.1, 0.5, "updates are left out"),
  Limit("reflex/held", 10.0, math.inf, "the learning rate exceeds its schedule and is limited"),
  Limit("moe/max_violation", 2.0, 6.0, "experts are loaded unevenly"),
  Limit("moe/min_load", 0.05, 0.0, "an expert gets next to no tokens", low=True),
  Limit("moe/dropped", 0.05, 0.3, "choices find no place (moe.capacity_factor)"),
  Limit("moe/z", 1000.0, 2500.0, "the router's logits grow (moe.z_loss)"),
  Limit("mod/agreement", 0.9, 0.6, "the causal rule differs from training's choice", low=True),
  Limit("mod/overflow", 0.2, 0.6, "chosen tokens find no place"),
)


def health_of(
  means: Mapping[str, float],
  nonfinite: int,
  finding: Finding | None,
  further: Sequence[Cause] = (),
) -> Health:
  """Say how an interval of steps was: as bad as the worst of all causes.

  Args:
    means: means of the metrics over the interval, by name.
    nonfinite: steps with a loss or gradient that was not finite.
    finding: the finding of the policy; None = nothing is wrong.
    further: causes that others report.
  """
  causes = list(further)
  if finding is not None:
    grave = finding.cause in ("state", "system")
    causes.append(Cause(finding.cause, 2 if grave else 1, f"{finding.cause}: {finding.reason}"))
  elif nonfinite:
    says = f"{nonfinite} steps with a loss or gradient that is not finite"
    causes.append(Cause("not finite", 1, says))
  for limit in LIMITS:
    value = means.get(limit.metric, math.nan)
    if level := limit.level(value):
      causes.append(Cause(limit.metric, level, f"{limit.metric} is {value:.3g}: {limit.says}"))
  causes.sort(key=lambda cause: -cause.level)
  names, levels, says = zip(*causes, strict=True) if causes else ((), (), ())
  return Health(LEVELS[max(levels, default=0)], says, names, levels)


def grown_logits(logits: Sequence[float], usual: Sequence[float], since: int) -> list[Cause]:
  """Whether attention logits are large and have grown; `usual` are those at step `since`."""
  pairs = enumerate(zip(logits, usual, strict=False))
  grown = [(now, now / max(was, 1.0), layer) for layer, (now, was) in pairs if math.isfinite(now)]
  grown = [found for found in grown if found[1] >= LOGIT_GROWTH]
  now, times, layer = max(grown, default=(0.0, 0.0, 0))
  says = (
    f"largest attention logit {now:.3g} in layer {layer}, {times:.2g}x since step {since:,} "
    "(model.qk_norm or a lower rate holds them)"
  )
  return [Cause("attention logits", 1, says)] if now >= LARGE_LOGIT else []


def moved(times: Sequence[float], names: Sequence[str]) -> list[Cause]:
  """Whether a tensor moved much farther than it usually does, unlike the others, or stood still.

  Args:
    times: see `Changes.times_usual`.
    names: of the tensors.
  """
  found = list(zip(times, names, strict=True))
  far = max(found, default=(0.0, ""))
  still = [name for time, name in found if time == 0.0]
  says = []
  if far[0] >= CHANGE_TIMES:
    says.append(f"{far[1]} moved {far[0]:.2g}x as far as usual since the last look, others did not")
  if still:
    more = f" and {len(still) - 3} more" if len(still) > 3 else ""
    says.append(f"{', '.join(still[:3])}{more} did not move since the last look")
  return [Cause("change of a tensor", 1, text) for text in says]


def risen(above: float) -> list[Cause]:
  """Whether held-out text is predicted worse than it was, beyond noise; `above` in nats."""
  says = f"the held-out loss is {above:.3g} nats above its best"
  return [Cause("held-out loss", 1, says)] if above else []
