"""Says in the log what becomes of the scale of the loss."""

from typing import Any

from absl import logging

from ats_jax.metrics.host_copy import start_copy
from ats_jax.metrics.watcher import Watcher


class ScaleWatch(Watcher):
  """Reads the scale at intervals, each an interval late, so that nothing waits for the device."""

  def __init__(self, every_steps: int):
    """Look each `every_steps` steps."""
    self._every_steps = every_steps
    self._pending: tuple[int, Any] | None = None
    self._known: tuple[float, float] | None = None  # scale, and updates left out so far

  def after(self, step: int, state: Any, metrics: Any) -> Any:
    """Take the `StepMetrics` of a step; see `Watcher`."""
    if step % self._every_steps == 0:
      self._say()
      start_copy(metrics.values)
      self._pending = step, metrics
    return state

  def summary(self) -> dict[str, float]:
    """Say what is left to say; no figures."""
    self._say()
    return {}

  def _say(self) -> None:
    if self._pending is None:
      return
    step, metrics = self._pending
    self._pending, values = None, metrics.on_host()
    scale = values["train/loss_scale"] * values["train/loss_scale_change"]
    skipped = values["train/skipped_updates"]
    before = self._known or (values["train/loss_scale"], 0.0)
    self._known = scale, skipped
    if self._known != before:
      logging.info(
        "loss scale: %.9g after step %d; %d updates were left out so far, as their gradients "
        "overflowed", scale, step, skipped,
      )  # fmt: skip
