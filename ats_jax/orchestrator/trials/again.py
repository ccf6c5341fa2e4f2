"""Steps made again, from where they began, with another learning rate: the other arm of a branch.

The first arm is training itself, on its own batches: a branch takes no data, and the time of as
many steps again. At most one state is on the devices; the others are in host memory.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.orchestrator.policy.plateau import Branch
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.step.metrics import METRICS, StepMetrics
from ats_jax.step.state import TrainState

Again = Callable[[TrainState], tuple[TrainState, StepMetrics]]


class Rerun:
  """What is kept to make the steps after `first` again.

  Attributes:
    first: step at which the arms part.
    rules: by which the probe was scored there.
  """

  def __init__(self, step: int, state: TrainState, probe: jax.Array | None, rules: Pass):
    """Begin with `state`, which made `step` updates; `probe` is what the eval step gave for it."""
    self.first, self.rules, self._probe = step, rules, probe
    self._start = Snapshot.take(step, state)
    self._again: list[Again] = []
    self._losses: list[jax.Array] = []

  def add(self, again: Again, metrics: StepMetrics) -> None:
    """Remember an update: what makes it from another state, and what came of it."""
    self._again.append(again)
    self._losses.append(metrics.values)

  def make(
    self, state: TrainState, factor: float, probe: Callable[[Decoder], jax.Array]
  ) -> tuple[Snapshot, TrainState, Branch]:
    """Make the steps again. Waits for the devices.

    Args:
      state: where the first arm ended; its memory is freed.
      factor: multiplies the learning rate.
      probe: gives the sums of an eval step, by the same rules.

    Returns:
      A snapshot of `state`, the state where the other arm ends, and what came of it.
    """
    sums = [self._probe, probe(state.model)]
    left = Snapshot.swap_out(self.first + len(self._again), state)
    other = self._start.resume()
    assert other.control is not None
    raised = other.control._replace(lr_scale=factor * other.control.lr_scale)
    other = dataclasses.replace(other, control=raised)
    losses = []
    for again in self._again:
      other, metrics = again(other)
      losses.append(metrics.values)
    at = METRICS.index("train/loss")
    kept, higher = (np.stack(jax.device_get(rows))[:, at] for rows in (self._losses, losses))
    gains = kept.astype(np.float64) - higher
    losses = map(probe_loss, jax.device_get([*sums, probe(other.model)]))
    error = gains.std() / math.sqrt(len(gains))
    return left, other, Branch(*losses, gain=float(gains.mean()), error=float(error))
