"""How often a metric spikes, in one number: the spike score of OLMo 2 (arXiv:2501.00656)."""

import math

import numpy as np

WINDOW = 1000  # values before the one that is judged
LEAST = 50  # finite ones among them: of fewer, the deviation says little
SIGMAS = 7.0
_CHUNK = 1024  # windows at once, which are 8 MB


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
  seen = np.concatenate([np.full(WINDOW, np.nan), np.where(np.isfinite(x), x, np.nan)])
  before = np.lib.stride_tricks.sliding_window_view(seen, WINDOW)
  judged = spikes = 0
  for first in range(0, len(x), _CHUNK):
    own = x[first : first + _CHUNK]
    windows = before[first : first + len(own)]
    enough = np.isfinite(windows).sum(axis=1) >= LEAST
    own, windows = own[enough], windows[enough]
    if not len(own):
      continue
    off = np.abs(own - np.nanmean(windows, axis=1))
    # Not the other way around: NaN is a spike. A value like all before it is none.
    calm = (off < SIGMAS * np.nanstd(windows, axis=1)) | (off == 0.0)
    judged, spikes = judged + len(own), spikes + int(np.sum(~calm))
  return spikes / judged if judged else math.nan
