"""What the orchestrator of a run found, compared and did; and what the loss did about then."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.checkpoint import workdir
from ats_jax.orchestrator.record import ledger, narrate
from ats_jax.orchestrator.record.ledger import LedgerLine
from ats_jax.orchestrator.signals.health import LEVELS
from ats_jax.report.columns import Column
from ats_jax.report.read import RunRecord
from ats_jax.store.paths import Path

ROWS_AROUND = 5  # rows of metrics before and after a decision whose means are compared
PROBE = "orchestrator/probe_loss"
# Kind of a line of the ledger -> of its event.
KINDS = {"bounded": "limited", "loss_scale": "limited", "comparison": "compared",
         "resumed_from": "resumed"}  # fmt: skip


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
  """The events of a run, in order; what was decided together is one, with its comparison.

  Raises:
    ValueError: if a line of the ledger cannot be read; names it.
  """
  found: list[Event] = []
  level, began = LEVELS[0], {again.last: again.since for again in run.again}
  together = lambda row: (row["kind"], row["step"], row.get("reason", row.number))
  for _, group in itertools.groupby(run.ledger, key=together):
    rows = list(group)
    with ledger.reading(Path(run.name) / workdir.DECISIONS, rows[0].number):
      if rows[0]["kind"] == "decision":
        step: int = rows[0]["step"]
        is_won = found and found[-1].kind == "compared" and found[-1].step == step
        said = found.pop().what if is_won else ""
        found.append(_decision(run, rows, said, began.get(step, step)))
        continue
      if rows[0]["kind"] == "check":
        now = rows[0]["health"]["level"]
        if rows[0]["stale"] or now == level:
          continue
        level = now
      found += map(_event, rows)
  return found


def _event(row: LedgerLine) -> Event:
  if row["kind"] != "check":
    return Event(row["step"], KINDS.get(row["kind"], "other"), narrate.event(row))
  seen = row["reading"]
  about = f"Of steps {seen['first']:,} to {seen['step']:,}."
  what = ": ".join((row["health"]["level"], *row["health"]["causes"]))
  return Event(row["step"], "finding", what, evidence=about)


def _decision(run: RunRecord, rows: Sequence[LedgerLine], compared: str, since: int) -> Event:
  first = rows[0]
  applied = all(row["applied"] for row in rows)
  advice = [row["fields"]["advice"] for row in rows if row["fields"].get("advice")]
  return Event(
    first["step"],
    "done" if applied else "not done",
    "; ".join(map(narrate.deed, rows)),
    narrate.because(first),
    " ".join(filter(None, [compared, *(f"What to do: {text}" for text in advice)])),
    " ".join(_before_and_after(run, since)) if applied else "",
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
        f"{words}: {_mean(before)} before (to step {before.steps[-1]:,}), {_mean(after)} after "
        f"(to step {after.steps[-1]:,})."
      )


def _mean(column: Column) -> str:
  mean = float(np.mean(column.values))
  return f"{mean:.4g}" if math.isfinite(mean) else "not finite"


def around(column: Column, step: int, rows: int) -> tuple[Column, Column]:
  """The last rows up to a step, and the first ones after it."""
  cut = int(np.searchsorted(column.steps, step, side="right"))
  before, after = slice(max(cut - rows, 0), cut), slice(cut, cut + rows)
  return (
    Column(column.steps[before], column.values[before]),
    Column(column.steps[after], column.values[after]),
  )
