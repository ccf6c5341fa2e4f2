"""The health report and the clock beside it."""

import math

import pytest

from ats_jax.metrics.clock import ASIDE, Clock
from ats_jax.orchestrator.record.teller import Teller
from ats_jax.orchestrator.signals.health import (
  grown_logits,
  health_of,
)
from ats_jax.orchestrator.signals.interval import Finding


@pytest.mark.parametrize(
  ("means", "level", "says"),
  [
    ({"train/z": 20.0}, "healthy", None),
    ({"train/z": 150.0}, "warning", "the logits grow"),
    ({"reflex/skipped": 0.6}, "critical", "updates are left out"),
    ({"moe/max_violation": 2.5}, "warning", "experts are loaded unevenly"),
    ({"moe/min_load": 0.0}, "critical", "an expert gets next to no tokens"),
    ({"mod/agreement": 0.8}, "warning", "the causal rule differs"),
    ({"train/z": float("nan")}, "healthy", None),
  ],
)
def test_a_mean_past_its_limit_is_a_cause(means, level, says):
  health = health_of(means, 0, None)
  assert health.level == level
  assert (says is None) == (not health.causes)
  assert says is None or says in health.causes[0]


def test_the_worst_cause_comes_first():
  finding = Finding("state", "weights are not finite")
  health = health_of({"train/z": 150.0}, 3, finding)
  assert health.level == "critical" and health.causes[0] == "state: weights are not finite"
  assert health_of({}, 3, None).level == "warning"


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


def test_waiting_for_data_is_told_from_steps():
  loop = Loop()
  clock = Clock(loop)
  loop.add(step=9.5, data_wait=0.5, eval=30.0)
  lap = clock.lap(10)
  assert lap["host/step_secs"] == pytest.approx(1.0)
  assert lap["host/data_wait_share"] == pytest.approx(0.05)


def test_without_totals_there_is_nothing_to_say():
  assert Clock(None).lap(10) == {}


def test_the_log_has_what_changes(caplog):
  teller = Teller(None, None)
  says = lambda: [record.getMessage() for record in caplog.records]
  one = lambda z: health_of({"train/z": z}, 0, None)
  with caplog.at_level("INFO", logger="absl"):
    for z in (150.0, 160.0, 170.0):
      teller.health(one(z))
    assert says() == ["health: warning: train/z is 150: the logits grow (step.z_loss holds them)"]
    teller.health(one(3000.0))
    teller.health(health_of({"train/z": 3000.0, "moe/dropped": 0.1}, 0, None))
    teller.health(health_of({}, 0, None))
    teller.health(one(150.0))
  assert [line.split(" is ")[0] for line in says()[1:]] == [
    "health: critical: train/z",
    "health: warning: moe/dropped",
    "health: moe/dropped: no more",
    "health: train/z: no more",
    "health: warning: train/z",
  ]


@pytest.mark.parametrize(
  ("logits", "level", "says"),
  [
    ((20.0, 210.0), "warning", "largest attention logit 210 in layer 1, 3x since step 40 "),
    ((2000.0, 210.0), "warning", "largest attention logit 2e+03 in layer 0, 2e+02x since"),
    ((20.0, 130.0), "healthy", ""),  # it began at 70
    ((40.0, 70.0), "healthy", ""),  # grown, but small
    ((math.nan, -math.inf), "healthy", ""),
  ],
)
def test_attention_logits_that_are_large_and_have_grown_are_a_cause(logits, level, says):
  health = health_of({}, 0, None, grown_logits(logits, (10.0, 70.0), 40))
  assert health.level == level and "".join(health.causes).startswith(says)
  assert not grown_logits(logits, (), 0)
