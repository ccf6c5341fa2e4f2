"""Steps that the orchestrator made again: what the run continued with was not logged first.

A comparison is between the run's own steps, whose rows are in metrics.jsonl, and steps to the same
point that something was done to. Where one of those wins, the run goes on from its end.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.checkpoint import workdir
from ats_jax.metrics.writer import is_time_key
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.ledger import LedgerLine
from ats_jax.report.columns import Column
from ats_jax.store.paths import Path

LOSS = "train/loss"
OF_WEIGHTS = ("train/", "reflex/", "moe/", "mod/")  # metrics that a step computes


class Again(NamedTuple):
  """Steps that were made again.

  Attributes:
    since: the last step before them.
    last: the last of them.
    losses: their training losses as the run continued: [last - since].
  """

  since: int
  last: int
  losses: np.ndarray

  def in_words(self) -> str:
    """Which steps, and what is shown of them."""
    return (
      f"Steps {self.since + 1:,} to {self.last:,} were made again: shown is the training loss with "
      "which the run continued; other metrics of these steps were not kept."
    )


def made_again(folder: Path, lines: Sequence[LedgerLine]) -> list[Again]:
  """The steps of each comparison that something else than going on has won.

  Raises:
    ValueError: if a line of the ledger cannot be read; names it.
  """
  found = []
  for line in lines:
    if line["kind"] == "comparison":
      with ledger.reading(folder / workdir.DECISIONS, line.number):
        losses = np.array([float(loss) for loss in line.get("losses", ())])  # "nan" is a text
        if len(losses):
          found.append(Again(line["step"] - len(losses), line["step"], losses))
  return found


def as_continued(columns: Mapping[str, Column], again: Sequence[Again]) -> dict[str, Column]:
  """Metrics of steps that were made again are left out, but for the loss as the run continued."""
  found = dict(columns)
  for name, (steps, values) in columns.items():
    if not name.startswith(OF_WEIGHTS) or is_time_key(name):
      continue
    kept, values = np.ones(len(steps), bool), values.copy()
    for one in again:
      within = (steps > one.since) & (steps <= one.last)
      if name == LOSS:
        values[within] = one.losses[steps[within] - one.since - 1]
      else:
        kept &= ~within
    found[name] = Column(steps[kept], values[kept])
  return found
