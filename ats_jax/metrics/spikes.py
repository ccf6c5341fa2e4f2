"""How often a metric spikes, in one number: the spike score of OLMo 2 (arXiv:2501.00656)."""

import math

import numpy as np

WINDOW = 1000  # values before the one that is judged
LEAST = 50  # finite ones among them: of fewer, the deviation says little
SIGMAS = 7.0


def spike_score(values: np.ndarray) -> float:
  """The share of values at least `SIGMAS` deviations away from the mean of those before them.

  A value is judged by the last `WINDOW` before it, or by all of them if there are fewer, but by
  `LEAST` at least. One that is not finite is a spike, and is not among those that others are
  judged by.

  Args:
    values: a metric by step, [steps].

  Returns:
    The share, 0 to 1, of the values that are judged; NaN if there are none.
  """
  x = np.asarray(values, np.float64)
  known = np.isfinite(x)
  if not known.any():
    return math.nan
  centre = np.median(x[known])  # squares of what is far from 0 would hide the deviation
  off = np.where(known, x - centre, 0.0)
  counts = _sums_before(known.astype(np.float64))
  enough = counts >= LEAST
  if not enough.any():
    return math.nan
  counts = np.maximum(counts, 1.0)
  means = _sums_before(off) / counts
  stds = np.sqrt(np.maximum(_sums_before(off**2) / counts - means**2, 0.0))
  away = np.abs(off - means)
  # Rounding is no spike of a metric that does not change.
  calm = known & ((away < SIGMAS * stds) | (away <= 1e-9 * np.abs(x)))
  return float(np.mean(~calm[enough]))


def _sums_before(x: np.ndarray) -> np.ndarray:
  """Of each value, the sum of the `WINDOW` before it: of the end of a block and of the next one.

  Sums within blocks, unlike differences of sums over all, forget a huge value that is long past.
  """
  blocks = np.pad(x, (0, -len(x) % WINDOW)).reshape(-1, WINDOW)
  zeros = np.zeros((len(blocks), 1))
  own = np.concatenate([zeros, np.cumsum(blocks, axis=1)[:, :-1]], axis=1)
  ends = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
  return (own + np.concatenate([zeros[:1].repeat(WINDOW, axis=1), ends[:-1]])).reshape(-1)[: len(x)]
