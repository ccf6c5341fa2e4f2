"""The learning rate: bounds, ends and shapes of every schedule."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.step.schedule import decay_from, learning_rate

# A handful of float32 operations on numbers of at most 60 steps.
RTOL = 3e-6
LONGEST = 60
PEAK = 3e-3
DECAYING = ("cosine", "linear", "wsd", "rex", "one_cycle")
ALL = (*DECAYING, "constant")


def rates(changes):
  cfg = tiny_config({"optimizer.learning_rate": PEAK} | changes)
  return np.asarray(learning_rate(cfg, jnp.arange(LONGEST + 20)), np.float64)


@st.composite
def schedules(draw):
  num_steps, name = draw(st.integers(1, LONGEST)), draw(st.sampled_from(ALL))
  return {
    "num_steps": num_steps,
    "optimizer.schedule": name,
    "optimizer.warmup_steps": draw(st.integers(0, num_steps)),
    **of_kind(name, draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.sampled_from(SHARES))),
  }


SHARES = [0.05, 0.2, 0.7, 1.0]


def of_kind(name, final, decay):
  """The settings that a schedule has, of these two."""
  settings = {"optimizer.schedule.final_fraction": final} if name in DECAYING else {}
  return settings | ({"optimizer.schedule.decay_fraction": decay} if name == "wsd" else {})


@hypothesis.settings(max_examples=60)
@hypothesis.given(schedules())
def test_bounds_and_ends(changes):
  lr, num_steps = rates(changes), changes["num_steps"]
  warmup, name = changes["optimizer.warmup_steps"], changes["optimizer.schedule"]
  final = PEAK * changes.get("optimizer.schedule.final_fraction", 1.0)
  assert lr[0] > 0 or (num_steps == 1 and final == 0)
  assert np.all(lr[: num_steps - 1] > 0) and np.all(lr <= PEAK * (1 + RTOL))
  if name == "one_cycle" and not warmup:
    warmup = max(1, round(0.3 * num_steps))
  if warmup:
    np.testing.assert_allclose(lr[:warmup], PEAK * np.arange(1, warmup + 1) / warmup, RTOL)
  after = lr[max(0, warmup - 1) :]
  np.testing.assert_allclose(after[0], PEAK, RTOL)
  assert np.all(np.diff(after) <= PEAK * RTOL)  # never rises again
  decays = name in DECAYING and num_steps - 1 > warmup
  if decays:
    np.testing.assert_allclose(lr[num_steps - 1 :], final, RTOL, PEAK * RTOL)


@pytest.mark.parametrize("name", ALL)
def test_shape_between_warmup_and_end(name):
  lr = rates(
    {
      "num_steps": 50,
      "optimizer.schedule": name,
      "optimizer.warmup_steps": 9,
      **of_kind(name, 0.2, 0.2),
    }
  )
  p = np.clip((np.arange(len(lr)) - 9) / 40, 0, 1)
  shape = {
    "linear": 1 - p,
    "cosine": (1 + np.cos(np.pi * p)) / 2,
    "one_cycle": (1 + np.cos(np.pi * p)) / 2,
    "rex": (1 - p) / (1 - p / 2),
    "wsd": 1 - np.clip((p - (1 - 10 / 41)) / (10 / 41), 0, 1),
    "constant": np.ones_like(p),
  }[name]
  want = PEAK * (0.2 + 0.8 * shape)
  np.testing.assert_allclose(lr[9:], want[9:], RTOL, PEAK * RTOL)


def test_warmup_fraction_is_a_share_of_the_run():
  steps = {"num_steps": 40, "optimizer.warmup_steps": 10}
  fraction = {"num_steps": 40, "optimizer.warmup_fraction": 0.25}
  np.testing.assert_array_equal(rates(steps), rates(fraction))
  both = fraction | {"optimizer.warmup_steps": 4}
  np.testing.assert_array_equal(rates(both), rates(steps | {"optimizer.warmup_steps": 4}))


MIXED = {
  "data.sources": {"a": ("a.txt",), "b": ("b.txt",)}, "data.batch_size": 2, "data.seq_len": 16,
}  # fmt: skip


@pytest.mark.parametrize("name", ["wsd", "one_cycle"])
def test_each_phase_has_a_schedule_of_its_own(name):
  """That of a run with its rate, its warm-up and its length; 300 tokens are 10 steps of 32."""
  common = {"optimizer.schedule": name, "optimizer.warmup_fraction": 0.5}
  phases = (
    Phase(Table(a=1), steps=20, learning_rate=3e-3, warmup_steps=4),
    Phase(Table(b=1), tokens=300, learning_rate=1e-3),
    Phase(Table(a=1, b=1), learning_rate=2e-4, warmup_steps=5),
  )
  found = rates(MIXED | common | {"data.phases": phases, "num_steps": 60})[:60]
  parts = [(20, 3e-3, 4), (10, 1e-3, 0), (30, 2e-4, 5)]
  alone = [
    rates({
      "optimizer.schedule": name, "num_steps": length, "optimizer.learning_rate": peak,
      "optimizer.warmup_steps": warmup,
    })[:length]
    for length, peak, warmup in parts
  ]  # fmt: skip
  np.testing.assert_allclose(found, np.concatenate(alone), rtol=RTOL)


def test_a_phase_behind_the_end_changes_nothing():
  two = (
    Phase(Table(a=1), steps=20, learning_rate=3e-3, warmup_steps=4),
    Phase(Table(b=1), learning_rate=1e-3),
  )
  found = rates(MIXED | {"data.phases": two} | {"num_steps": 15})[:15]
  want = rates({"num_steps": 20, "optimizer.warmup_steps": 4})[:15]
  np.testing.assert_array_equal(found, want)


def test_the_length_with_which_a_decay_begins_now():
  changes = {"optimizer.schedule": "wsd", "optimizer.schedule.decay_fraction": 0.25}
  cfg = tiny_config({"optimizer.learning_rate": PEAK, "num_steps": 1000} | changes)
  length = decay_from(cfg, 29)
  assert length == 40
  found = rates(changes | {"num_steps": length})
  assert found[29] == pytest.approx(PEAK) and found[31] < PEAK
