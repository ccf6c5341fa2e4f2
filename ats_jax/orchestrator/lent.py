"""What the training loop lends to whoever watches it."""

from collections.abc import Mapping
from typing import Any, Protocol

from ats_jax.data.batch import POSITION
from ats_jax.orchestrator.signals.interval import Rows
from ats_jax.orchestrator.trials.paired import Ahead, Update


class Loop(Protocol):
  """What the training loop lends; what is lent is asked for when it is needed."""

  def position(self) -> Mapping[str, Any]:
    """What a checkpoint of the state would hold beside it and what the supervisor has `saved`."""
    ...

  def again(self) -> Update:
    """What makes the last update once more, from another state."""
    ...

  def ahead(self, saved: Mapping[str, Any] | None = None) -> Ahead:
    """What makes the updates that come next, on batches that the loop will read again.

    Args:
      saved: what `position` gave; the updates are those that came after it. None = now.
    """
    ...


def rows_read(loop: Loop | None, step: int) -> Rows | None:
  """Where the loop is in the data after `step`; None if it does not say."""
  position = {} if loop is None else loop.position()
  return Rows(step, position[POSITION]["row"]) if POSITION in position else None
