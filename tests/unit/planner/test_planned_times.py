"""Planned times against steps that GPUs took."""

import pytest

from lab.planned_times import STEPS, planned


@pytest.mark.thorough
@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s.devices} {s.gpu}, {s.name}")
def test_a_measured_step_is_planned_to_within_15_percent(step):
  assert planned(step) == pytest.approx(step.ms, rel=0.15)
