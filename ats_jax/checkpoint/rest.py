"""What the checkpoints of a run leave out of its state, since something else has it."""

from typing import Any

from ats_jax.checkpoint.layout import PyTree


class Rest:
  """Nothing: a checkpoint holds the whole state."""

  def left_out(self, state: PyTree) -> PyTree:
    """The part of `state` to save, with None in place of the rest; also of shapes of a state."""
    return state

  def put_back(self, part: PyTree) -> PyTree:
    """The whole state of a `part` that was restored.

    Raises:
      ValueError: if the rest is not where it was.
    """
    return part

  def saved(self) -> dict[str, Any]:
    """JSON values for a checkpoint's `extra`, which say where the rest is."""
    return {}
