"""What watches a run from outside where no supervisor does: nobody, or a person's rules."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.policy.state import Decision
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.step.state import StepMetrics, TrainState

RULE_METRICS = ("rule/skipped", "rule/rate")
PATIENCE = 10  # losses in a row that are not finite though the steps were left out


class Unguarded(NoSupervisor):
  """Ends a run at the first loss that is not finite, as `train` does with mode=off.

  A rule that left the step out has `PATIENCE`.
  """

  def __init__(self):
    self._broken = 0

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, as it is.

    Raises:
      FloatingPointError: if the loss is not finite.
    """
    row = metrics.on_host()
    self._broken = 0 if math.isfinite(row["train/loss"]) else self._broken + 1
    if self._broken > (PATIENCE if row.get("rule/skipped") else 0):
      raise FloatingPointError(f"the loss is not finite at step {step}")
    return state


class Rewind(NoSupervisor):
  """What many do by hand: back 20 to 30 steps when the loss stands high, or is not finite.

  Looks each `EVERY` steps at the median of the newest losses that were trained on, against that of
  those before: `RISE` nats and `SIGMAS` of them above it, the run goes back. Not tuned.
  """

  EVERY, BACK, COPIES = 10, 20, 4
  NEWEST, BEFORE, LEAST = 10, 50, 30  # losses
  RISE, SIGMAS = 0.25, 3.0

  def __init__(self):
    self._copies: list[Snapshot] = []
    self._losses: list[float] = []

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """Begin with a state that is taken to be good."""
    del saved
    self._copies, self._losses = [Snapshot.take(step, state)], []

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, or an earlier one."""
    row = metrics.on_host()
    if not row["rule/skipped"]:
      self._losses.append(row["train/loss"])
    if not np.isfinite([row["train/param_norm"], *self._losses[-1:]]).all():
      return self._back(step, state, "not finite")
    if step % self.EVERY:
      return state
    newest = self._losses[-self.NEWEST :]
    before = self._losses[-self.NEWEST - self.BEFORE : -self.NEWEST]
    if len(before) >= self.LEAST:
      rise = np.median(newest) - np.median(before)
      if rise > max(self.RISE, self.SIGMAS * np.std(before)):
        return self._back(step, state, f"the loss rose by {rise:.2f} nats")
    self._copies = [*self._copies, Snapshot.take(step, state)][-self.COPIES :]
    return state

  def _back(self, step: int, state: TrainState, reason: str) -> TrainState:
    old = [copy for copy in self._copies if copy.step <= step - self.BACK]
    self._copies, self._losses = old or self._copies[:1], []
    decision = Decision(len(self.decisions), Rollback(), "state", 1.0, reason)
    self.decisions = (*self.decisions, (step, decision))
    return dataclasses.replace(self._copies[-1].resume(), step=jnp.full_like(state.step, step))

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, as it is: `after` has looked at it."""
    del step, metrics
    return state
