"""The health report and the clock behind its words on speed."""

import pytest

from ats_jax.metrics.clock import ASIDE, LEAST, Clock
from ats_jax.orchestrator.policy.decide import Finding
from ats_jax.orchestrator.signals.health import report


@pytest.mark.parametrize(
  ("means", "level", "says"),
  [
    ({"train/z": 20.0, "host/data_wait_share": 0.02}, "healthy", None),
    ({"train/z": 150.0}, "warning", "the logits grow"),
    ({"reflex/skipped": 0.6}, "critical", "updates are left out"),
    ({"moe/max_violation": 2.5}, "warning", "experts are loaded unevenly"),
    ({"moe/min_load": 0.0}, "critical", "an expert gets next to no tokens"),
    ({"mod/agreement": 0.8}, "warning", "the causal rule differs"),
    ({"host/data_wait_share": 0.7}, "critical", "steps wait for data"),
    ({"train/z": float("nan")}, "healthy", None),
  ],
)
def test_a_mean_past_its_limit_is_a_cause(means, level, says):
  health = report(means, 0, None)
  assert health.level == level
  assert (says is None) == (not health.causes)
  assert says is None or says in health.causes[0]


def test_the_worst_cause_comes_first():
  finding = Finding("state", 1.0, True, "weights are not finite")
  health = report({"train/z": 150.0}, 3, finding)
  assert health.level == "critical" and health.causes[0] == "state: weights are not finite"
  assert report({}, 3, None).level == "warning"


class Loop:
  """Seconds a step, of which some wait for data; evaluation and so on besides."""

  def __init__(self):
    self.spent = dict.fromkeys(("wall", "data_wait", "step", "other", *ASIDE), 0.0)

  def __call__(self):
    return {f"goodput/{name}_secs": secs for name, secs in self.spent.items()}

  def add(self, **secs):
    for name, value in secs.items():
      self.spent[name] += value
      self.spent["wall"] += value


def test_a_slow_loader_is_told_from_slow_steps():
  loop = Loop()
  clock = Clock(loop)
  for _ in range(LEAST):
    loop.add(step=9.5, data_wait=0.5, eval=30.0)
    lap = clock.lap(10)
    assert "host/slower" not in lap
  assert lap["host/step_secs"] == pytest.approx(1.0)
  assert lap["host/data_wait_share"] == pytest.approx(0.05)
  loop.add(step=9.5, data_wait=90.5)
  slow = clock.lap(10)
  assert slow["host/data_wait_share"] == pytest.approx(0.905)
  assert slow["host/slower"] == pytest.approx(0.0)
  health = report(slow, 0, None)
  assert health.level == "critical" and len(health.causes) == 1
  loop.add(step=28.5)
  slow = clock.lap(10)
  assert slow["host/data_wait_share"] == 0.0 and slow["host/slower"] == pytest.approx(2.0)
  assert "steps take longer" in report(slow, 0, None).causes[0]


def test_without_totals_there_is_nothing_to_say():
  assert Clock(None).lap(10) == {}
