"""How far a run is: tokens, phases of the learning rate, clipped gradients."""

import pytest
from helpers import tiny_config

from ats_jax.step.course import Course
from ats_jax.step.schedule import phase

WSD = {"optimizer.schedule": "wsd", "optimizer.schedule.decay_fraction": 0.5}


@pytest.mark.parametrize(
  ("changes", "phases"),  # of ten steps
  [
    ({"optimizer.schedule": "constant"}, "1111111111"),
    ({"optimizer.schedule": "constant", "optimizer.warmup_steps": 4}, "0000111111"),
    ({"optimizer.schedule": "cosine", "optimizer.warmup_steps": 2}, "0022222222"),
    ({**WSD, "optimizer.warmup_steps": 2}, "0011222222"),
    ({"optimizer.schedule": "linear"}, "2222222222"),
  ],
)
def test_phases_of_schedules(changes, phases):
  cfg = tiny_config({"num_steps": 10, **changes})
  assert "".join(str(phase(cfg, step)) for step in range(1, 11)) == phases


def test_progress_counts_rows_of_an_earlier_batch_size():
  cfg = tiny_config({"num_steps": 10, "data.batch_size": 8, "optimizer.grad_clip": 0.5})
  course = Course(cfg, first_step=4, first_row=16)  # four steps of four rows
  metrics = course.metrics(7, {"train/grad_norm": 0.75})
  assert metrics["progress/tokens"] == 40 * cfg.data.seq_len
  assert metrics["progress/share"] == 40 / 64
  assert metrics["train/clipped"] == 1.0
  assert course.metrics(8, {"train/grad_norm": 0.5})["train/clipped"] == 0.0
  unclipped = Course(tiny_config({"optimizer.grad_clip": 0.0}))
  assert "train/clipped" not in unclipped.metrics(1, {"train/grad_norm": 9.0})
