"""The training loss of each source against its own history: did its text change, or the model?"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ats_jax.data.rows.origin import Origin
from ats_jax.orchestrator.constants import (
  SHARE_RATIO,
  SOURCE_MARGIN,
  SOURCE_SIGMAS,
  USUAL_LOOKS,
)
from ats_jax.orchestrator.signals.interval import RowsRead, SourceLoss, Steps

SHOWN_DOCUMENTS = 3
EXPLANATIONS = {
  True: "the model got worse on it, as its held-out text shows",
  False: "its text changed, as its held-out text is predicted no worse",
  None: "its text changed, or the model got worse on it",
}

History = tuple[tuple[float, float], ...]  # the loss and the share of a source at its last looks


class Rise(NamedTuple):
  """A source whose training loss is above its own history.

  Attributes:
    source: its name.
    loss: nats per token.
    usual: the same before.
    is_worse: whether its held-out text is predicted worse too; None = it has none.
  """

  source: str
  loss: float
  usual: float
  is_worse: bool | None = None

  @property
  def says(self) -> str:
    """In words."""
    why = EXPLANATIONS[self.is_worse]
    return f"source {self.source}: training loss {self.loss:.3g}, before {self.usual:.3g}: {why}"


def risen_from(history: History, now: SourceLoss) -> float | None:
  """The usual loss of a source, if it is clearly above that now; else None."""
  losses = [loss for loss, _ in history]
  if len(losses) < USUAL_LOOKS or has_other_share(history, now):
    return None
  noise = max(now.error, float(np.median(np.abs(np.diff(losses)))))
  usual = float(np.median(losses[-USUAL_LOOKS:]))
  return usual if now.loss - usual > max(SOURCE_MARGIN, SOURCE_SIGMAS * noise) else None


def has_other_share(history: History, now: SourceLoss) -> bool:
  """Whether a source has another share of the text than before, which may cost it some loss."""
  usual = float(np.median([share for _, share in history]))
  return not usual / SHARE_RATIO <= now.share <= usual * SHARE_RATIO


def where(
  source: str, steps: Steps, read: RowsRead, batch_size: int, origin: Callable[[int], Origin]
) -> str:
  """Which rows of a source are those of the step in which its loss was highest, in words.

  Args:
    source: its name.
    steps: those up to `read`.
    read: where the loop was behind the last of them.
    batch_size: rows of a step.
    origin: says where a row of the run comes from.
  """
  losses = steps.columns[f"train/{source}/loss"]
  at = int(np.nanargmax(losses))
  end = read.row - (len(losses) - 1 - at) * batch_size
  origins = [origin(row) for row in range(end - batch_size, end)]
  own = [found for found in origins if found.parts[:1] == (source,)]
  worst = f"{losses[at]:.3g} at the worst in step {read.step - (len(losses) - 1 - at):,}"
  if not own:  # the loader is not where the steps say, which is a finding of its own
    return worst
  documents = list(dict.fromkeys(name for found in own for name in found.documents))
  more = len(documents) - SHOWN_DOCUMENTS
  listed = ", ".join(documents[:SHOWN_DOCUMENTS]) + (f" and {more} more" if more > 0 else "")
  of_files = f" ({listed})" if documents else ""
  return f"{worst}, rows {own[0].row:,} to {own[-1].row:,} of the source{of_files}"
