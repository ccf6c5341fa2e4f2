"""How a run is doing, in one word and its causes."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from ats_jax.orchestrator.policy.state import Finding

LEVELS = ("healthy", "warning", "critical")


class Health(NamedTuple):
  """A report.

  Attributes:
    level: one of `LEVELS`.
    causes: what makes it so, in words, the worst first.
  """

  level: str
  causes: tuple[str, ...]


class Limit(NamedTuple):
  """When a mean over an interval is worth a word.

  Attributes:
    metric: its name.
    warning: from here on.
    critical: from here on; infinite if it never is.
    says: what it means.
    low: small values are the bad ones.
  """

  metric: str
  warning: float
  critical: float
  says: str
  low: bool = False


# Runs without sparse layers lack the metrics of those. Sources: MaxVio arXiv:2408.15664; logits of
# size 50 are where bfloat16 resolves 0.25 (so z about 2500); predictors of MoD arXiv:2404.02258.
LIMITS = (
  Limit("train/z", 100.0, 2500.0, "the logits grow (step.z_loss holds them)"),
  Limit("reflex/skipped", 0.1, 0.5, "updates are left out"),
  Limit("moe/max_violation", 2.0, 6.0, "experts are loaded unevenly"),
  Limit("moe/min_load", 0.05, 0.0, "an expert gets next to no tokens", low=True),
  Limit("moe/dropped", 0.05, 0.3, "choices find no place (moe.capacity_factor)"),
  Limit("moe/z", 1000.0, 2500.0, "the router's logits grow (moe.z_loss)"),
  Limit("mod/agreement", 0.9, 0.6, "the causal rule differs from training's choice", low=True),
  Limit("mod/overflow", 0.2, 0.6, "chosen tokens find no place"),
  Limit("host/data_wait_share", 0.1, 0.5, "steps wait for data (data.num_workers, data.prefetch)"),
  Limit("host/slower", 0.5, 2.0, "steps take longer than they did, by this share, data apart"),
)


def report(means: Mapping[str, float], nonfinite: int, finding: Finding | None) -> Health:
  """Say how an interval of steps was.

  Args:
    means: of the metrics, over the interval.
    nonfinite: steps with a loss or gradient that was not finite.
    finding: what the policy found.
  """
  causes: list[tuple[int, str]] = []
  if finding is not None:
    grave = finding.cause in ("state", "system")
    causes.append((2 if grave else 1, f"{finding.cause}: {finding.reason}"))
  elif nonfinite:
    causes.append((1, f"{nonfinite} steps with a loss or gradient that is not finite"))
  for limit in LIMITS:
    value = means.get(limit.metric, math.nan)
    sign = -1.0 if limit.low else 1.0
    if sign * value >= sign * limit.warning:
      level = 2 if sign * value >= sign * limit.critical else 1
      causes.append((level, f"{limit.metric} is {value:.3g}: {limit.says}"))
  causes.sort(key=lambda cause: -cause[0])
  return Health(LEVELS[causes[0][0]] if causes else "healthy", tuple(why for _, why in causes))
