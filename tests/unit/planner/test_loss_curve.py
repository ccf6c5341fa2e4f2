"""The forecast of the final loss on curves whose law is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ats_jax.planner.curve import Curve, fit_curve, forecast, schedule_phase

STEPS = 1000


def wsd(steps: int = STEPS, peak: float = 3e-3, warmup: int = 50, decay: float = 0.3) -> np.ndarray:
  t = np.arange(steps)
  down = np.clip((t - (1 - decay) * steps) / (decay * steps), 0, 1)
  return peak * np.minimum(1, (t + 1) / warmup) * (1 - 0.9 * down)


def cosine(steps: int = STEPS, peak: float = 3e-3, warmup: int = 50) -> np.ndarray:
  t = np.arange(steps)
  rise = np.minimum(1, (t + 1) / warmup)
  return peak * rise * (0.55 + 0.45 * np.cos(np.pi * np.maximum(0, t - warmup) / (steps - warmup)))


def law(rates, *, floor=1.2, scale=0.9, alpha=0.4, gain=1.5, memory=100) -> np.ndarray:
  """Tissue's equation as it is printed, a double sum."""
  steps = len(rates)
  lag = np.arange(steps)[:, None] - np.arange(steps)
  decay = np.where(lag >= 0, (1 - 1 / memory) ** np.maximum(lag, 0), 0.0)
  drops = np.where(np.arange(steps) > rates.argmax(), -np.diff(rates, prepend=rates[0]), 0.0)
  won = np.cumsum(decay @ drops)
  return floor + scale * np.cumsum(rates) ** -alpha - gain * won


def observed(rates, losses, *, until=1.0, every=10, noise=0.0, seed=0) -> Curve:
  steps = np.arange(every, int(until * len(rates)) + 1, every)
  scatter = noise * np.random.default_rng(seed).standard_normal(len(steps))
  return Curve(steps, losses[steps - 1] + scatter, rates)


def last(losses: np.ndarray) -> float:
  """What is forecast: the mean of the last 50th."""
  return float(losses[-(len(losses) // 50) :].mean())


@settings(max_examples=8, deadline=None)
@given(
  floor=st.floats(0.5, 2.5),
  scale=st.floats(0.5, 2.0),
  alpha=st.sampled_from([0.2, 0.4, 0.7]),
  gain=st.floats(0.2, 2.0),
  memory=st.sampled_from([20, 100, 500]),
  until=st.sampled_from([0.3, 0.5, 0.9]),
  plan=st.sampled_from([wsd, cosine]),
)
def test_a_known_law_is_found_again_with_the_help_of_a_shorter_run(
  floor, scale, alpha, gain, memory, until, plan
):
  shape = dict(alpha=alpha, gain=gain, memory=memory)
  short, rates = plan(600), plan()
  # The reference is another model: its loss differs, what annealing wins does not.
  family = fit_curve(observed(short, law(short, floor=floor + 0.2, scale=1.1 * scale, **shape)))
  losses = law(rates, floor=floor, scale=scale, **shape)
  curve = observed(rates, losses, until=until)
  found = forecast(curve, fit_curve(curve, family))
  assert found.loss == pytest.approx(last(losses), abs=0.02)
  low, high = found.interval(0.9)
  assert low < last(losses) < high


@pytest.mark.parametrize("until", [0.3, 0.8])
def test_intervals_cover_and_are_of_use(until):
  rates = wsd()
  losses = law(rates)
  runs = 12
  inside, widths, errors = 0, [], []
  for seed in range(runs):
    family = fit_curve(observed(rates, losses, noise=0.02, seed=1000 + seed))
    curve = observed(rates, losses, until=until, noise=0.02, seed=seed)
    end = forecast(curve, fit_curve(curve, family))
    low, high = end.interval(0.9)
    noise = 0.02 / np.sqrt(2) * np.random.default_rng(2000 + seed).standard_normal()
    inside += low < last(losses) + noise < high
    widths.append(high - low)
    errors.append(end.loss - last(losses))
  assert inside >= 0.8 * runs  # 90 % is claimed
  assert abs(np.mean(errors)) < 0.015
  fall = losses[int(until * STEPS)] - last(losses)
  assert np.mean(widths) < 0.5 * fall + 0.1


def test_correlated_scatter_counts_for_less():
  rates = wsd()
  curve = observed(rates, law(rates), until=0.9)
  errors = []
  for memory in (0.0, 0.8):
    of_seeds = []
    for seed in range(5):
      scatter = np.random.default_rng(seed).standard_normal(len(curve.steps) + 50)
      for i in range(1, len(scatter)):
        scatter[i] = memory * scatter[i - 1] + np.sqrt(1 - memory**2) * scatter[i]
      noisy = fit_curve(Curve(curve.steps, curve.losses + 0.02 * scatter[50:], curve.rates))
      of_seeds.append(np.sqrt(noisy.covariances[0, 0, 0]) / noisy.scatter)
    errors.append(np.mean(of_seeds))
  assert errors[1] > 1.4 * errors[0]


def test_before_the_decay_and_without_a_reference_it_is_a_bound_from_above():
  rates = wsd()
  losses = law(rates)
  curve = observed(rates, losses, until=0.6)
  end = forecast(curve, fit_curve(curve))
  low, high = end.interval(0.9)
  assert (end.is_annealed, low) == (False, -np.inf)
  assert last(losses) < high
  # Once the decay shows, the run itself tells.
  curve = observed(rates, losses, until=0.9)
  end = forecast(curve, fit_curve(curve))
  assert end.is_annealed
  assert end.loss == pytest.approx(last(losses), abs=0.02)
  np.testing.assert_array_equal(forecast(curve, fit_curve(curve)).samples, end.samples)


def test_another_plan_from_here_and_a_sharper_difference():
  rates = wsd()
  shape = dict(alpha=0.4, gain=1.5, memory=100)
  family = fit_curve(observed(rates, law(rates, **shape), noise=0.01, seed=1))
  curve = observed(rates, law(rates, **shape), until=0.5, noise=0.01)
  fitted = fit_curve(curve, family)
  sooner, later = wsd(715), wsd(2000)
  here = forecast(curve, fitted)
  for other in (sooner, later):
    end = forecast(curve, fitted, other)
    assert end.loss == pytest.approx(last(law(other, **shape)), abs=0.04)
    true = last(law(other, **shape)) - last(law(rates, **shape))
    change = end.samples - here.samples
    assert np.median(change) == pytest.approx(true, abs=0.03)
    assert np.std(change) < np.std(end.samples) + np.std(here.samples)
  assert forecast(curve, fitted, sooner).loss > here.loss > forecast(curve, fitted, later).loss


def test_a_rate_that_falls_by_a_rounding_error_tells_nothing_of_its_decay():
  rates = wsd()
  curve = observed(rates, law(rates), until=0.6)
  nearly = np.where(np.arange(STEPS) > 400, rates * (1 - 1e-7), rates)
  assert not fit_curve(Curve(curve.steps, curve.losses, nearly)).is_annealed


def test_many_rows_are_averaged_without_a_bias():
  rates = wsd()
  losses = law(rates)
  dense = observed(rates, losses, until=0.9, every=1)
  assert forecast(dense, fit_curve(dense)).loss == pytest.approx(last(losses), abs=0.01)
  noisy = observed(rates, losses, until=0.9, every=1, noise=0.1)
  assert fit_curve(noisy).scatter == pytest.approx(0.1 / np.sqrt(20), rel=0.4)


def test_phases():
  rates = {"wsd": wsd(), "cosine": cosine(), "constant": np.ones(STEPS)}
  for schedule, step, phase in (
    ("wsd", 1, "warm-up"), ("wsd", 48, "warm-up"), ("wsd", 49, "stable"), ("wsd", 699, "stable"),
    ("wsd", 710, "decay"), ("wsd", 999, "decay"), ("wsd", STEPS, "end"), ("cosine", 10, "warm-up"),
    ("cosine", 300, "decay"), ("constant", 1, "stable"), ("constant", 999, "stable"),
  ):  # fmt: skip
    assert schedule_phase(rates[schedule], step) == phase, (schedule, step)


def test_what_is_wrong_is_said():
  rates, losses = wsd(), law(wsd())
  with pytest.raises(ValueError, match=r"5 points after step 100, .* 8 are needed"):
    fit_curve(observed(rates, losses, until=0.2, every=20))
  losses[399] = np.nan
  with pytest.raises(ValueError, match="not finite at step 400"):
    fit_curve(observed(rates, losses))
