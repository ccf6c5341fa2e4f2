"""Do the counts agree? What the device, the schedule and the data say of a step is known before."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.orchestrator.signals.interval import Finding, RowsRead, Steps

Schedule = Callable[..., Any]  # see `step.schedule.learning_rate`
ROUNDING = 1e-4  # of the highest rate; the device computes it in float32


def wrong_counts(cfg: Config, schedule: Schedule | None, steps: Steps) -> list[Finding]:
  """What an interval reports that cannot be of its steps, which the host counts.

  Args:
    cfg: the run.
    schedule: gives the learning rate; None = it is not compared.
    steps: the interval.
  """
  column, before = steps.columns, steps.numbers - 1  # updates done before each
  if "reflex/step" in column:
    counted = column["reflex/step"]
    off = np.flatnonzero(counted != before.astype(np.float32))
    if off.size:
      step, says = before[off[0]] + 1, counted[off[0]] + 1
      return [Finding("count", f"the state's step says {says:.0f} of update {step}")]
  if schedule is None:
    return []
  known, reported = schedule(cfg, before, np), column["train/scheduled_rate"]
  off = np.flatnonzero(~(np.abs(reported - known) <= ROUNDING * cfg.optimizer.learning_rate))
  if not off.size:
    return []
  at = off[0]
  says = (
    f"update {before[at] + 1} was made at a rate of {reported[at]:.6g}, the schedule's is "
    f"{known[at]:.6g}: the state counts other steps"
  )
  return [Finding("count", says)]


def wrong_position(cfg: Config, begin: RowsRead | None, now: RowsRead | None) -> list[Finding]:
  """Whether the data is elsewhere than the steps since `begin` say; nothing mends that."""
  if begin is None or now is None:
    return []
  want = begin.row + (now.step - begin.step) * cfg.data.batch_size
  if now.row == want:
    return []
  reason = f"{now.row:,} training rows were read by step {now.step:,} in place of {want:,}"
  return [Finding("data", reason, "Start again from the last checkpoint, which knows its rows.")]
