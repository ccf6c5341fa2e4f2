"""What an interval of steps is summed up to."""

import numpy as np
import pytest

from ats_jax.orchestrator.constants import TURNOVER_STEPS
from ats_jax.orchestrator.signals.interval import Steps, sum_up

NAMES = [f"train/{name}" for name in ("loss", "param_norm", "update_norm")]
NAMES += [f"train/{name}" for name in ("learning_rate", "scheduled_rate")]
NAMES += [f"reflex/{name}" for name in ("z_loss", "grad_scale", "skipped", "broken", "held")]
NAMES += [f"reflex/{name}" for name in ("wrong", "wrong_tensor", "miscounted")]


def rows(steps=3, **columns):
  """Steps, ones but for some columns."""
  found = np.ones((steps, len(NAMES)), np.float32)
  for name, values in columns.items():
    found[:, NAMES.index(f"train/{name}")] = values
  return found


def test_the_learning_rate_is_the_schedules():
  """Or a cut that is given back would look like a schedule that rises, which widens the margin."""
  seen = sum_up(
    Steps(NAMES, 3, rows(learning_rate=[0.5, 0.5, 1.0], scheduled_rate=[4.0, 3.0, 2.0]))
  )
  assert seen.learning_rate == 2.0


@pytest.mark.parametrize("steps", [TURNOVER_STEPS, 10 * TURNOVER_STEPS])
def test_fast_updates_show_however_long_the_interval_is(steps):
  """A warm-up before them, and weights that grow, would hide them in means of all steps."""
  updates, weights = np.zeros(steps), np.full(steps, 50.0)
  updates[-TURNOVER_STEPS:], weights[:TURNOVER_STEPS] = 2.0, 20.0
  seen = sum_up(Steps(NAMES, steps, rows(steps, update_norm=updates, param_norm=weights)))
  assert (seen.fastest, seen.norm) == (2.0, 20.0)
