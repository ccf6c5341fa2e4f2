"""In place of a supervisor, where nobody is to watch."""

import sys
from collections.abc import Mapping
from typing import Any

from absl import logging

from ats_jax.metrics.watcher import Watcher
from ats_jax.step.program import Program
from ats_jax.step.state import StepMetrics, TrainState, check_finite


class NoSupervisor(Watcher):
  """Nobody watches (`orchestrator.mode=off`); only weights that are not finite are not saved."""

  wants_checkpoint = wants_restart = False
  decisions: tuple[Any, ...] = ()

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """Begin before the update after `step`: say so if there are hooks, which nobody calls."""
    hooks = sys.modules.get("ats_jax.orchestrator.hooks")  # a plain run does not import it
    if hooks is not None and hooks.number():
      logging.warning(
        "orchestrator.mode=off: none of %d hooks is called. Set orchestrator.mode=act, or "
        "register none.", hooks.number(),
      )  # fmt: skip

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """The train step was compiled anew: nothing to do."""

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """Check that the weights that are to be saved are finite.

    Raises:
      FloatingPointError: if they are not.
    """
    check_finite(step, metrics)
    return state

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """An evaluation was made: nothing to do."""

  def saved(self) -> dict[str, Any]:
    """What a checkpoint keeps of the supervisor: nothing."""
    return {}
