"""What the orchestrator of a run found, compared and did; and what the loss did about then."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.checkpoint import workdir
from ats_jax.orchestrator.record import ledger, narrate
from ats_jax.orchestrator.record.influence import tell_bounded, tell_scale
from ats_jax.orchestrator.record.ledger import LedgerLine
from ats_jax.orchestrator.signals.health import LEVELS
from ats_jax.report.read import Column, RunRecord
from ats_jax.store.paths import Path

ROWS_AROUND = 5  # rows of metrics before and after a decision whose means are compared
PROBE = "orchestrator/probe_loss"


class Event(NamedTuple):
  """Something that the ledger records.

  Attributes:
    step: at which.
    kind: "done", "not done" (only observed), "compared", "limited", "finding", "resumed", "other".
    what: what it was, in words.
    cause: what led to it.
    evidence: what was measured for it.
    effect: the losses before and after it.
  """

  step: int
  kind: str
  what: str
  cause: str = ""
  evidence: str = ""
  effect: str = ""


def events_of(run: RunRecord) -> list[Event]:
  """The events of a run, in order; decisions that were taken together are one.

  Raises:
    ValueError: if a line of the ledger cannot be read; names it.
  """
  found: list[Event] = []
  compared, level = "", LEVELS[0]
  together = lambda row: (row["kind"], row["step"], row.get("reason", row.number))
  for _, group in itertools.groupby(run.ledger, key=together):
    rows = list(group)
    with ledger.reading(Path(run.name) / workdir.DECISIONS, rows[0].number):
      if rows[0]["kind"] == "comparison":
        compared = narrate.comparison(rows[0])
      elif rows[0]["kind"] == "decision":
        found.append(_decision(run, rows, compared))
        compared = ""
        continue
      elif rows[0]["kind"] == "check":
        now = rows[0]["health"]["level"]
        if rows[0]["stale"] or now == level:
          continue
        level = now
      found += map(_event, rows)
  return found


def _event(row: LedgerLine) -> Event:
  step = row["step"]
  match row["kind"]:
    case "check":
      return Event(step, "finding", ": ".join((row["health"]["level"], *row["health"]["causes"])))
    case "bounded":
      return Event(step, "limited", tell_bounded(row))
    case "loss_scale":
      return Event(step, "limited", tell_scale(row))
    case "comparison":
      return Event(step, "compared", narrate.comparison(row))
    case "resumed_from":
      return Event(step, "resumed", narrate.event(row))
    case _:
      return Event(step, "other", narrate.event(row))


def _decision(run: RunRecord, rows: Sequence[LedgerLine], compared: str) -> Event:
  first = rows[0]
  applied = all(row["applied"] for row in rows)
  advice = [row["fields"]["advice"] for row in rows if row["fields"].get("advice")]
  return Event(
    first["step"],
    "done" if applied else "not done",
    "; ".join(map(narrate.deed, rows)),
    narrate.because(first),
    " ".join(filter(None, [compared, *(f"What to do: {text}" for text in advice)])),
    " ".join(_before_and_after(run, first["step"])) if applied else "",
  )


def _before_and_after(run: RunRecord, step: int) -> Iterator[str]:
  """Losses about a step, as far as there are any on both sides."""
  for name, rows, words in (
    ("train/loss", ROWS_AROUND, f"training loss, mean of up to {ROWS_AROUND} rows"),
    (PROBE, 1, "loss of the probe"),
    ("eval/loss", 1, "loss of the evaluation"),
  ):
    before, after = around(run.column(name), step, rows)
    if len(before.values) and len(after.values):
      yield (
        f"{words}: {np.mean(before.values):.4g} before (to step {before.steps[-1]:,}), "
        f"{np.mean(after.values):.4g} after (to step {after.steps[-1]:,})."
      )


def around(column: Column, step: int, rows: int) -> tuple[Column, Column]:
  """The last rows up to a step, and the first ones after it."""
  cut = int(np.searchsorted(column.steps, step, side="right"))
  before, after = slice(max(cut - rows, 0), cut), slice(cut, cut + rows)
  return (
    Column(column.steps[before], column.values[before]),
    Column(column.steps[after], column.values[after]),
  )
