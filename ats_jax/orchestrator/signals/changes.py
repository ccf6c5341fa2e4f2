"""How far each tensor moved between two looks, against what is usual for it.

A tensor is not kept: a few random sums of it are, whose differences tell how far it moved.
"""

import base64
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from ats_jax.metrics.host_copy import start_copy
from ats_jax.model.decoder import Decoder
from ats_jax.model.param import trainable
from ats_jax.orchestrator.constants import HISTORY, USUAL_LOOKS
from ats_jax.step import tensors

SUMS = 16  # of each tensor; a change is known to about a fifth then


class Changes:
  """Follows the tensors of a run from look to look."""

  def __init__(self):
    """Nothing is usual yet."""
    self._last: np.ndarray | None = None
    self._usual = deque[np.ndarray](maxlen=HISTORY)
    self._project = jax.jit(lambda model: tensors.projections(trainable(model), SUMS))

  def to_json(self) -> list[str | None]:
    """What it remembers, for a checkpoint: the last sums, then what was usual; bits as text."""
    text = lambda x: None if x is None else base64.b64encode(x.tobytes()).decode()
    return [text(self._last), *map(text, self._usual)]

  def restore(self, saved: Sequence[str | None]) -> None:
    """Remember what `to_json` gave."""
    last, *usual = (
      None if text is None else np.frombuffer(base64.b64decode(text), np.float64) for text in saved
    )
    self._last = None if last is None else last.reshape(SUMS, -1)
    self._usual.extend(moved for moved in usual if moved is not None)

  def begin(self, model: Decoder) -> jax.Array:
    """Begin to measure; what comes of it is on its way to the host."""
    sums = self._project(model)
    start_copy(sums)
    return sums

  def forget(self) -> None:
    """Something else than steps moved the tensors: the next change says nothing."""
    self._last = None

  def begin_anew(self) -> None:
    """Other tensors train from now on: nothing is usual any more."""
    self._last = None
    self._usual.clear()

  def times_usual(self, sums: jax.Array) -> np.ndarray:
    """Of each tensor, its change over its usual one, beside what moved all alike, as the rate does.

    Waits for what `begin` gave. Ones while nothing is usual, and of what usually stays.
    """
    now, last = np.asarray(sums, np.float64), self._last
    self._last = now
    times = np.ones(now.shape[1])
    if last is None:
      return times
    moved = np.sqrt(np.mean(np.square(now - last), axis=0))
    if len(self._usual) >= USUAL_LOOKS:
      usual = np.median(self._usual, axis=0)
      np.divide(moved, usual, out=times, where=usual > 0.0)
      times /= max(float(np.median(times[usual > 0.0])), 1.0) if (usual > 0.0).any() else 1.0
    self._usual.append(moved)
    return times
