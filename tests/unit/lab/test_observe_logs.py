"""When the rules on training losses would have spoken, by logs with spikes that were put there."""

import csv
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.observe_logs import Alarm, alarms, delays, read

INTERVAL, LENGTH = 10, 3000


def losses(seed):
  """Of a sound run: a descent and noise."""
  steps = np.arange(1, LENGTH + 1)
  noise = np.random.default_rng(seed).normal(0.0, 0.05, LENGTH)
  return 2.0 + 3.0 * np.exp(-steps / 300) + noise


def log(path, values):
  rows = [{"step": step, "loss": x} for step, x in enumerate(map(float, values), 1)]
  with path.open("w", newline="") as file:
    writer = csv.DictWriter(file, ["step", "loss"])
    writer.writeheader()
    writer.writerows(rows)
  return read(path)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), at=st.integers(1000, 2000), rise=st.floats(0.5, 3.0))
def test_what_stays_is_seen_and_what_passes_is_not(tmp_path_factory, seed, at, rise):
  path = tmp_path_factory.mktemp("logs") / "loss.csv"
  sound = losses(seed)
  sound[at - 500] += 2.0  # one step
  assert not alarms(log(path, sound), INTERVAL)
  spiky = sound.copy()
  spiky[at:] += rise
  found = alarms(log(path, spiky), INTERVAL)
  (delay,), elsewhere = delays(found, [at], INTERVAL)
  assert delay is not None and delay <= 3 * INTERVAL and not elsewhere
  spiky[at:] = math.nan
  assert "no loss or gradient was finite" in alarms(log(path, spiky), INTERVAL)[0].reason


def test_a_log_of_a_run_is_read_as_one_of_columns_is(tmp_path):
  path, values = tmp_path / "metrics.jsonl", losses(0)[:50]
  rows = [{"step": 1, "eval/loss": 9.0}, {"step": 1, "train/loss": 7.0}]
  rows += [{"step": s, "train/loss": float(x)} for s, x in enumerate(values, 1)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  for mine, theirs in zip(read(path), log(tmp_path / "loss.csv", values), strict=True):
    np.testing.assert_array_equal(mine, theirs)
  (tmp_path / "odd.csv").write_text("step,loss\n1,high\n")
  with pytest.raises(ValueError, match="row 1 has no step and loss"):
    read(tmp_path / "odd.csv")
  (tmp_path / "none.csv").write_text("step,accuracy\n1,0.5\n")
  with pytest.raises(ValueError, match="has no losses"):
    read(tmp_path / "none.csv")


def test_an_alarm_is_of_the_spike_before_it():
  found = [Alarm(step, "") for step in (40, 130, 150, 400)]
  assert delays(found, [120, 145, 500], INTERVAL) == ([10, 5, None], 2)
  assert delays(found, [], INTERVAL) == ([], 4)
