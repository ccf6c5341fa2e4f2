"""In place of a supervisor, where nobody is to watch."""

from collections.abc import Mapping
from typing import Any, Self

from ats_jax.orchestrator.policy.state import Decision
from ats_jax.step.program import Program
from ats_jax.step.state import StepMetrics, TrainState, check_finite


class NoSupervisor:
  """Nobody watches (`orchestrator.mode=off`); only weights that are not finite are not saved."""

  wants_checkpoint = wants_restart = False
  decisions: tuple[tuple[int, Decision], ...] = ()
  replayed = 0

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    pass

  def start(self, step: int, state: TrainState, saved: Mapping[str, Any] | None = None) -> None:
    """See `Supervisor.start`."""

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """See `Supervisor.follow`."""

  def after(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, as it is."""
    del step, metrics
    return state

  def settle(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state, as it is.

    Raises:
      FloatingPointError: if its weights are not finite.
    """
    check_finite(step, metrics)
    return state

  def saved(self) -> dict[str, Any]:
    """Nothing to keep."""
    return {}
