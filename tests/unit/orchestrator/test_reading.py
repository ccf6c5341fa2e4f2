"""What an interval of steps is summed up to."""

import numpy as np

from ats_jax.orchestrator.signals.interval import Steps, sum_up

NAMES = [f"train/{name}" for name in ("loss", "param_norm", "learning_rate", "scheduled_rate")]
NAMES += [f"reflex/{name}" for name in ("z_loss", "grad_scale", "skipped", "broken", "held")]
NAMES += [f"reflex/{name}" for name in ("wrong", "wrong_tensor", "miscounted")]


def rows(**columns):
  """Three steps, ones but for some columns."""
  found = np.ones((3, len(NAMES)), np.float32)
  for name, values in columns.items():
    found[:, NAMES.index(f"train/{name}")] = values
  return found


def test_the_learning_rate_is_the_schedules():
  """Or a cut that is given back would look like a schedule that rises, which widens the margin."""
  seen = sum_up(
    Steps(NAMES, 3, rows(learning_rate=[0.5, 0.5, 1.0], scheduled_rate=[4.0, 3.0, 2.0]))
  )
  assert seen.learning_rate == 2.0
