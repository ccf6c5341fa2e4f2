"""Readings as a run would give them, for tests of what is made of them."""

import math
from typing import Any

from ats_jax.orchestrator.signals.interval import Reading

INTERVAL = 10
HEALTHY: dict[str, Any] = dict(
  loss=2.0, recent_z=0.0, probe=2.0, sound=True, nonfinite=0, broken=0, skipped=0, surprising=0,
  shrunk=0, held=0, bucket=0.0, cusum=0.0, learning_rate=1e-3, applied=1e-3,
  means={"train/loss": 2.0, "train/param_norm": 10.0, "train/update_norm": 0.01},
)  # fmt: skip
# What each fault looks like; with a held-out loss of 2 before it.
NAN_STATE = dict(sound=False, probe=math.nan, nonfinite=10, broken=10, skipped=10)
EDITED = dict(wrong=1, tensor="layers/0/attn/q")  # and no harm done
BAD_STATE = EDITED | dict(probe=5.0, loss=5.0, recent_z=50.0, cusum=60.0, surprising=10)
BAD_DATA = dict(loss=5.0, recent_z=50.0, cusum=60.0, surprising=10)
NAN_GRADIENT = dict(nonfinite=10, broken=10, skipped=10, loss=math.nan)
HELD = dict(held=25, learning_rate=4e-3, applied=1.3e-3)
HELD_AND_WORSE = HELD | dict(probe=2.3)


def reading(number: int, **changes: Any) -> Reading:
  """The `number`-th interval of a run, from 0."""
  fields = {**HEALTHY, **changes}
  return Reading(first=number * INTERVAL + 1, step=(number + 1) * INTERVAL, **fields)
