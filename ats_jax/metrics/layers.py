"""What each sparse layer does, over a run: `layers.jsonl` in the workdir."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ats_jax.metrics.writer import JsonlWriter


class LayerLog(JsonlWriter):
  """One JSON object a line: `{"step": 10, "wall_time": ..., "moe/load": [[0.12, ...], ...]}`.

  Numbers that are not finite are `null`.
  """

  def write_arrays(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a row."""
    self._write(step, {name: _finite(np.asarray(a, np.float64)) for name, a in arrays.items()})


def _finite(array: np.ndarray) -> Any:
  """Nested lists."""
  values = array.astype(object)
  values[~np.isfinite(array)] = None
  return values.tolist()
