"""What follows a run from step to step."""

import contextlib
from typing import Any


class Watcher:
  """Follows a run from step to step. Each method does nothing unless a subclass overrides it.

  `train.run.Run.watchers` lists those of a run, and they are called in that order.
  """

  def before(self, step: int, state: Any) -> None:
    """Update `step` (1-based) is about to be made from `state`, and its program is compiled."""

  def after(self, step: int, state: Any, metrics: Any) -> Any:
    """Update `step` was made and left `state` and `metrics`, which may not be computed yet.

    Returns:
      The state with which the run goes on.
    """
    del step, metrics
    return state

  def pause(self, step: int, name: str) -> contextlib.AbstractContextManager[None]:
    """Around work other than steps, after update `step`; `name` is a category of `Goodput`."""
    del step, name
    return contextlib.nullcontext()

  def summary(self) -> dict[str, float]:
    """Figures of the whole run, for its report at the end."""
    return {}
