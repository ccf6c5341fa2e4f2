"""The final loss of a run from a part of its curve, with an interval.

The curve is that of Tissue et al. 2024 (arXiv:2408.11029, eq. 1), a function of the learning rates:
L(s) = L0 + A S1^-alpha - C S2, with S1 the sum of the rates and S2 what annealing has won, a sum of
their drops with memory lambda. While the rate is constant S2 is 0, so C cannot be known from a WSD
run before its decay: it comes from a reference run of the same recipe.

n: points, G: grid of (alpha, lambda), F: L0, A, C, S: samples.
"""

import dataclasses
import itertools

import numpy as np

BINS = 50  # a point is the mean of a 50th of the run
MIN_POINTS = 8
SKIPPED_FRACTION = 0.1  # first share of the run, whose fall is steeper than any power law's
ALPHAS = np.arange(0.05, 1.51, 0.05)
MEMORIES = (10, 20, 50, 100, 200, 500, 1000)  # 1 / (1 - lambda), steps
MIN_ANNEALING = 0.01  # share of the peak rate by which S2 must change before it tells something
SAMPLES = 1000
# How far the change that a reference foretells is off in a run of its family, as a share of the
# change: docs/guides/planning.md has the runs that it was read from.
FAMILY_SPREAD = 0.1


@dataclasses.dataclass(frozen=True)
class Curve:
  """The loss curve of a run so far, and its learning rates.

  Attributes:
    steps: updates after which the loss was measured, 1-based, increasing: [n].
    losses: the losses of those steps, in nats per token: [n].
    rates: the learning rate of each update of the run, past and planned: [num_steps].
    scale: what the schedule's rates to come are multiplied with.
  """

  steps: np.ndarray
  losses: np.ndarray
  rates: np.ndarray
  scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class CurveFit:
  """The posterior of L0, A and C for each alpha and lambda of the grid.

  Attributes:
    log_weights: log weights of the points of the grid: [G].
    means: means of L0, A, C: [G, 3].
    covariances: covariances of L0, A, C: [G, 3, 3].
    scatter: standard deviation of a point about the curve.
    is_annealed: whether C is known from something.
  """

  log_weights: np.ndarray
  means: np.ndarray
  covariances: np.ndarray
  scatter: float
  is_annealed: bool


@dataclasses.dataclass(frozen=True)
class Forecast:
  """A forecast loss, as samples.

  Attributes:
    samples: samples of the mean loss over the last 50th of the run: [S].
    is_annealed: False if the samples leave out what the decay of the rate will win, which neither
      the run nor a reference tells: then they bound the loss from above.
  """

  samples: np.ndarray
  is_annealed: bool

  @property
  def loss(self) -> float:
    """The median of the samples, in nats per token."""
    return float(np.median(self.samples))

  def interval(self, coverage: float) -> tuple[float, float]:
    """The middle `coverage` of the samples; its low end is -inf if the decay is left out."""
    low, high = np.quantile(self.samples, [(1 - coverage) / 2, (1 + coverage) / 2])
    return (float(low) if self.is_annealed else -np.inf), float(high)


def schedule_phase(rates: np.ndarray, step: int) -> str:
  """The phase of the schedule after `step` updates: warm-up, stable, decay or end.

  Args:
    rates: the learning rate of each update by the schedule: [num_steps].
    step: the number of updates made so far.
  """
  if step >= len(rates):
    return "end"
  peak = rates.max()
  if rates[step] >= 0.999 * peak:
    return "stable"
  return "warm-up" if step < rates.argmax() else "decay"


def fit_curve(curve: Curve, reference: CurveFit | None = None) -> CurveFit:
  """Fit the curve, with what a reference run says of alpha, lambda and C as the prior.

  Bayesian linear regression of L0, A, C at each point of the grid. The residuals are taken as
  autocorrelated: n of them count as n (1 - r) / (1 + r), r their correlation with the next.

  Raises:
    ValueError: if there are too few points, or losses that are no numbers.
  """
  skipped = _first_step(curve.rates)
  X_GnF, y_n = _binned(curve, skipped)
  residuals_Gn = y_n - np.stack([X @ np.linalg.lstsq(X, y_n)[0] for X in X_GnF])
  squares_G = np.sum(residuals_Gn**2, axis=1)
  best = residuals_Gn[squares_G.argmin()]
  correlation = np.clip(best[:-1] @ best[1:] / (best @ best + 1e-300), 0.0, 0.9)
  scatter = np.sqrt(squares_G.min() / (len(y_n) - 3)) + 1e-9
  variance = scatter**2 * (1 + correlation) / (1 - correlation)

  precision_GFF = np.swapaxes(X_GnF, 1, 2) @ X_GnF / variance
  target_GF = np.swapaxes(X_GnF, 1, 2) @ y_n / variance
  is_annealed = bool(np.ptp(X_GnF[:, :, 2]) > MIN_ANNEALING * curve.rates.max())
  is_annealed |= reference is not None and reference.is_annealed
  prior_G, centre_G = np.full(len(X_GnF), 1e-12), np.zeros(len(X_GnF))
  if reference is not None:
    prior_G, centre_G = 1 / reference.covariances[:, 2, 2], reference.means[:, 2]
  precision_GFF[:, 2, 2] += prior_G
  target_GF[:, 2] += prior_G * centre_G
  covariances = np.linalg.inv(precision_GFF)
  means = np.einsum("gij,gj->gi", covariances, target_GF)
  misfit_Gn = y_n - np.einsum("gnf,gf->gn", X_GnF, means)
  log_weights = -0.5 * np.sum(misfit_Gn**2, axis=1) / variance
  log_weights -= 0.5 * prior_G * (means[:, 2] - centre_G) ** 2
  if reference is not None:
    log_weights += reference.log_weights
  return CurveFit(log_weights - log_weights.max(), means, covariances, float(scatter), is_annealed)


def forecast(curve: Curve, fitted: CurveFit, rates: np.ndarray | None = None) -> Forecast:
  """Forecast the loss at the end of a run.

  Args:
    curve: the curve of the run so far.
    fitted: the fit of that curve.
    rates: other learning rates to continue with, [its number of steps]; None = those of the
      curve. Forecasts of several plans share their samples, so that their differences are
      sharper than either.
  """
  rates = curve.rates if rates is None else rates
  rng = np.random.default_rng(0)
  weights = np.exp(fitted.log_weights)
  points_S = rng.choice(len(weights), SAMPLES, p=weights / weights.sum())
  roots_GFF = np.linalg.cholesky(fitted.covariances)
  noise_SF = rng.standard_normal((SAMPLES, 3))
  theta_SF = fitted.means[points_S] + np.einsum("sij,sj->si", roots_GFF[points_S], noise_SF)
  if not fitted.is_annealed:
    theta_SF[:, 2] = 0.0
  last = np.arange(len(rates) - max(1, len(rates) // BINS), len(rates)) + 1
  one_bin = np.array([0])
  now_SF = _features(curve.rates, curve.steps[-1:], one_bin)[points_S, 0]
  end_SF = _features(rates, last, one_bin)[points_S, 0]
  change_S = np.sum((end_SF - now_SF) * theta_SF, axis=1)
  spread_S = 1 + FAMILY_SPREAD * rng.standard_normal(SAMPLES)
  scatter_S = fitted.scatter * rng.standard_normal(SAMPLES)
  samples = np.sum(now_SF * theta_SF, axis=1) + change_S * spread_S + scatter_S
  return Forecast(samples, fitted.is_annealed)


def _first_step(rates: np.ndarray) -> int:
  """The first step that is fitted."""
  return max(int(rates.argmax()) + 1, round(SKIPPED_FRACTION * len(rates)))


def _binned(curve: Curve, skipped: int) -> tuple[np.ndarray, np.ndarray]:
  """Features [G, n, 3] and losses [n], means over bins, which the model's linearity allows."""
  used = curve.steps > skipped
  steps, losses = curve.steps[used], curve.losses[used]
  if not np.isfinite(losses).all():
    raise ValueError(
      f"the loss is not finite at step {steps[~np.isfinite(losses)][0]}: no curve fits that."
    )
  bins = (steps - 1) * BINS // len(curve.rates)
  _, starts, sizes = np.unique(bins, return_index=True, return_counts=True)
  if len(starts) < MIN_POINTS:
    raise ValueError(
      f"{len(starts)} points after step {skipped}, where fitting begins; {MIN_POINTS} are needed, "
      f"and a {BINS}th of the run gives one at most. Longer runs, "
      "or a loss that is measured more often, have more."
    )
  return _features(curve.rates, steps, starts), np.add.reduceat(losses, starts) / sizes


def _features(rates: np.ndarray, steps: np.ndarray, starts: np.ndarray) -> np.ndarray:
  """What multiplies L0, A and C, mean over `steps` in bins that begin at `starts`: [G, bins, 3]."""
  mean = lambda values: np.add.reduceat(values, starts) / np.diff(starts, append=len(steps))
  summed, ones = np.cumsum(rates)[steps - 1], np.ones(len(starts))
  powers = [mean(summed**-alpha) for alpha in ALPHAS]
  gains = [mean(_annealed(rates, memory)[steps - 1]) for memory in MEMORIES]
  return np.stack(
    [np.stack([ones, power, -gain], axis=1) for power, gain in itertools.product(powers, gains)]
  )


def _annealed(rates: np.ndarray, memory: float) -> np.ndarray:
  """S2: sum over i <= s of sum over k <= i of (rate_{k-1} - rate_k) lambda^{i-k}; [num_steps]."""
  drops = -np.diff(rates, prepend=rates[0])
  drops[: rates.argmax() + 1] = 0.0  # a warm-up anneals nothing
  decay = 1 - 1 / memory
  momentum = itertools.accumulate(drops, lambda m, drop: decay * m + drop)
  return np.cumsum(np.fromiter(momentum, float, len(drops)))
