"""Readings as a run would give them, for tests of what is made of them."""

import math
from typing import Any

from ats_jax.orchestrator.signals.interval import Reading

INTERVAL = 10
HEALTHY: dict[str, Any] = dict(
  loss=2.0, recent_z=0.0, probe=2.0, sound=True, nonfinite=0, broken=0, skipped=0, held=0,
  bucket=0.0, cusum=0.0, learning_rate=1e-3, means={"train/loss": 2.0},
)  # fmt: skip
# What each fault looks like; with a held-out loss of 2 before it.
NAN_STATE = dict(sound=False, probe=math.nan, nonfinite=10, broken=10, skipped=10)
BAD_STATE = dict(probe=5.0, loss=5.0, recent_z=50.0, cusum=60.0, skipped=10, bucket=10.0)
BAD_DATA = dict(loss=5.0, recent_z=50.0, cusum=60.0, skipped=10, bucket=20.0)
NAN_GRADIENT = dict(nonfinite=10, broken=10, skipped=10, loss=math.nan)
HELD = dict(held=25)
HELD_AND_WORSE = dict(held=25, probe=2.2)


def reading(number: int, **changes: Any) -> Reading:
  """The `number`-th interval of a run, from 0."""
  fields = {**HEALTHY, **changes}
  return Reading(first=number * INTERVAL + 1, step=(number + 1) * INTERVAL, **fields)
