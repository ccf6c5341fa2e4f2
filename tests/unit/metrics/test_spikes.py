"""The spike score on series made by hand."""

import math

import numpy as np
import pytest

from ats_jax.metrics.spikes import LEAST, WINDOW, spike_score


def wave(count, level=2.0, size=0.01):
  """Up and down around a level: its deviation is `size`."""
  return level + size * (-1.0) ** np.arange(count)


def test_seven_deviations_on_either_side():
  for off, share in ((6.99, 0.0), (7.01, 1 / 51), (-6.99, 0.0), (-7.01, 1 / 51)):
    series = np.append(wave(LEAST + 50), 2.0 + off * 0.01)
    assert spike_score(series) == pytest.approx(share)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_and_spoils_no_window(odd):
  series = wave(3000)
  series[[100, 1500]] = odd
  assert spike_score(series) == pytest.approx(2 / (3000 - LEAST))


def test_only_the_last_values_count():
  """From the level before, the new one is far away; after a window it is usual again."""
  high, low = wave(2000, level=9.0, size=1e-3), wave(2000, level=2.0, size=1e-3)
  spikes = spike_score(np.concatenate([high, low])) * (4000 - LEAST)
  assert 1 <= round(spikes) < 30  # the deviation of both levels soon covers the distance
  late = np.concatenate([high, low])
  late[2000 + WINDOW + 500] = 2.1
  assert round(spike_score(late) * (4000 - LEAST)) == round(spikes) + 1


def test_windows_are_those_of_a_loop():
  """Also after a value so large that a sum over all would forget the others."""
  rng = np.random.default_rng(0)
  series = rng.standard_t(2, 5000)
  series[700], series[1200] = 1e12, math.nan
  spikes = judged = 0
  for i, value in enumerate(series):
    before = series[max(0, i - WINDOW) : i]
    before = before[np.isfinite(before)]
    if len(before) >= LEAST:
      judged += 1
      spikes += not abs(value - before.mean()) < 7.0 * before.std()
  assert spikes > 10 and spike_score(series) == pytest.approx(spikes / judged)


def test_what_cannot_be_judged():
  assert math.isnan(spike_score(np.array([]))) and math.isnan(spike_score(wave(LEAST)))
  assert math.isnan(spike_score(np.full(200, math.nan)))
  assert spike_score(np.full(200, 1.5)) == 0.0 == spike_score(np.full(5000, 0.1))
