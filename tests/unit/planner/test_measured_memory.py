"""Planned memory against peaks that GPUs had."""

import pytest

from lab.planned_memory import STEPS, planned

TOO_SMALL = pytest.mark.xfail(strict=True, reason="what takes 68 GiB was not found")


def marked(step):
  name = f"{step.devices} {step.gpu}, {step.name}"
  marks = TOO_SMALL if step.name == "131,072, residuals cut" else ()
  return pytest.param(step, id=name, marks=marks)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [marked(step) for step in STEPS])
def test_a_measured_step_is_planned_to_within_8_percent(step):
  assert planned(step) == pytest.approx(step.gib, rel=0.08)
