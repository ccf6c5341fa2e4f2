"""A long series in few points: the least and the greatest value of each part stay."""

import itertools

import numpy as np


def kept(values: np.ndarray, buckets: int) -> np.ndarray:
  """The places of the points to keep, in order: at most three of each bucket, and both ends.

  Args:
    values: [n]; may hold what is not finite, of which each bucket keeps the first.
    buckets: equal parts of the series.
  """
  if len(values) <= 2 * buckets:
    return np.arange(len(values))
  edges = np.linspace(0, len(values), buckets + 1).astype(int)
  finite = np.isfinite(values)
  low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
  places = {0, len(values) - 1}
  for begin, end in itertools.pairwise(edges.tolist()):
    part = slice(begin, end)
    places |= {begin + int(low[part].argmin()), begin + int(high[part].argmax())}
    if not finite[part].all():
      places.add(begin + int(finite[part].argmin()))
  return np.array(sorted(places))
