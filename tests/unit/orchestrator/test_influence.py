"""The story of what was left out or shrunk: steps, tokens, rows."""

import numpy as np

from ats_jax.orchestrator.record.influence import (
  bounded_steps,
  scale_changes,
  tell_bounded,
  tell_scale,
)
from ats_jax.orchestrator.signals.interval import Steps

NAMES = ("train/tokens", "reflex/skipped", "reflex/grad_scale", "reflex/rate_scale")
USUAL = (100.0, 0.0, 1.0, 1.0)
LEFT_OUT = (90.0, 1.0, 1.0, 1.0)
SHRUNK = (100.0, 0.0, 0.5, 1.0)


def line(last_step, *rows, **changes):
  found = bounded_steps(Steps(NAMES, last_step, np.array(rows, np.float32)))
  assert found is not None
  where = {"row": 8 * last_step, "step_of_row": last_step, "batch_size": 8}
  return {**found, **where, **changes}


def test_steps_with_their_whole_influence_are_no_story():
  assert bounded_steps(Steps(NAMES, 4, np.array([USUAL] * 4))) is None
  assert bounded_steps(Steps(NAMES[:2], 4, np.array([USUAL[:2]] * 4))) is None


def test_steps_tokens_and_rows_are_told():
  found = line(20, USUAL, LEFT_OUT, LEFT_OUT, USUAL, SHRUNK, LEFT_OUT)
  assert (found["left_out"], found["shrunk"], found["tokens"]) == ([16, 17, 20], [19], 270.0)
  assert tell_bounded(found) == (
    "3 batches (steps 16-17, 20) left out, 270 tokens (47.4% of these steps'), rows 120-135, "
    "152-159; 1 batch (steps 19) shrunk, rows 144-151"
  )
  assert "rows" not in tell_bounded({**found, "row": None, "step_of_row": None})


def test_the_last_row_is_where_the_loop_was():
  """A batch size that changed, an epoch that began elsewhere: only the end counts."""
  found = line(20, LEFT_OUT, row=1000, batch_size=4)
  assert tell_bounded(found).endswith("rows 996-999")


def test_what_becomes_of_the_scale_of_the_loss():
  names = ["train/loss_scale", "train/loss_scale_change", "train/skipped"]
  found = scale_changes(Steps(names, 8, np.array([[8, 0.5, 1], [4, 0.5, 1], [2, 1, 0], [2, 2, 0]])))
  assert found == {"left_out": [5, 6], "doubled": [8], "scale": 4.0}
  assert tell_scale(found) == (
    "loss scale: 4; gradients overflowed in 2 batches (steps 5-6), which are left out; doubled "
    "after steps 8"
  )
  assert scale_changes(Steps(names, 8, np.array([[8, 1, 0]] * 4))) is None
  assert scale_changes(Steps(["train/loss"], 8, np.ones((4, 1)))) is None
