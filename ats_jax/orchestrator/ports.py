"""What the training loop offers the supervisor."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ats_jax.data.batch import POSITION, Batch
from ats_jax.data.rows.origin import Origin
from ats_jax.orchestrator.signals.interval import RowsRead
from ats_jax.step.state import StepMetrics, TrainState


class NextUpdates(NamedTuple):
  """What makes updates in a comparison.

  Attributes:
    train_step: `(state, batch) -> (state, metrics)`, compiled; donates the state.
    batches: opens the training batches from some position on, on the mesh.
    wide_step: as `train_step`, without 8 bits; None where there are none.
  """

  train_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
  batches: Callable[[], AbstractContextManager[Iterator[Batch]]]
  wide_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]] | None = None


class Loop(Protocol):
  """The interface of the training loop for the supervisor."""

  def position(self) -> Mapping[str, Any]:
    """The loop's part of a checkpoint's `extra`: without the state and the supervisor's `saved`."""
    ...

  def origin(self, row: int) -> Origin:
    """Where a training row of the run comes from."""
    ...

  def ahead(self, saved: Mapping[str, Any] | None = None) -> NextUpdates:
    """Functions that make updates and lend their batches, which the loop reads all the same.

    Args:
      saved: what `position` returned; the updates are those after it. None = now.
    """
    ...


def rows_read(loop: Loop | None, step: int) -> RowsRead | None:
  """Where the loop is in the data after `step`; None if it does not say."""
  position = {} if loop is None else loop.position()
  return RowsRead(step, position[POSITION]["row"]) if POSITION in position else None
