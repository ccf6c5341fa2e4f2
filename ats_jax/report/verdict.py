"""A verdict on a run in words, from facts alone: nothing in it guesses why something happened."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from ats_jax.metrics.progress import duration
from ats_jax.report.columns import Column
from ats_jax.report.events import Event
from ats_jax.report.facts import device_hours
from ats_jax.report.read import RunRecord


def verdict(run: RunRecord, events: Sequence[Event], num_changed: int, preset: str) -> list[str]:
  """Sentences: how it stands, the losses, what the orchestrator did, where the time went.

  Args:
    run: the run.
    events: its events.
    num_changed: settings that differ from the preset.
    preset: what that is called.
  """
  return [
    run.state.says,
    *_losses(run),
    *_orchestrator(run, events),
    *(one.in_words() for one in run.again),
    *_time(run),
    f"{num_changed} settings differ from {preset}.",
  ]


def _losses(run: RunRecord) -> Iterator[str]:
  train, evaluated = run.column("train/loss"), run.column("eval/loss")
  if (ends := _ends(train)) is not None:
    (first, at), (last, to) = ends
    yield f"The training loss went from {first:.4g} (step {at:,}) to {last:.4g} (step {to:,})."
  if broken := _nonfinite(train):
    yield broken
  if (ends := _ends(evaluated)) is not None:
    values = [value if math.isfinite(value) else math.inf for value in evaluated.values.tolist()]
    place = values.index(min(values))
    last, to = ends[1]
    best, at = values[place], evaluated.steps[place]
    if at == to:
      yield f"The last evaluation is the best one: loss {best:.4g} at step {at:,}."
    else:
      yield (
        f"The best evaluation has loss {best:.4g} at step {at:,}; the last one has {last:.4g} at "
        f"step {to:,}, {last - best:+.4g}."
      )
    simple = run.column("eval/bigram_loss")
    if len(simple.values):
      bigrams, unigrams = float(simple.values[-1]), run.column("eval/unigram_loss").values[-1]
      word = "below" if last < bigrams else "NOT below"
      yield (
        f"The last validation loss, {last:.4g}, is {word} that of a bigram model of the same "
        f"tokens, {bigrams:.4g}; single tokens by their frequency have {unigrams:.4g}."
      )
  else:
    yield "It has no evaluation."


def _ends(column: Column) -> tuple[tuple[float, int], tuple[float, int]] | None:
  """The first and the last finite value, with their steps."""
  rows = zip(column.values.tolist(), column.steps.tolist(), strict=True)
  known = [row for row in rows if math.isfinite(row[0])]
  return (known[0], known[-1]) if known else None


def _nonfinite(column: Column) -> str:
  steps = [
    step
    for step, value in zip(column.steps.tolist(), column.values.tolist(), strict=True)
    if not math.isfinite(value)
  ]
  if not steps:
    return ""
  return f"The training loss is not finite in {len(steps)} rows, first at step {steps[0]:,}."


def _orchestrator(run: RunRecord, events: Sequence[Event]) -> Iterator[str]:
  looks = Counter(row["health"]["level"] for row in run.ledger if row["kind"] == "check")
  if not run.ledger:
    yield "No orchestrator watched it."
    return
  counts = ", ".join(f"{count} {level}" for level, count in looks.most_common())
  made = Counter(bool(row["applied"]) for row in run.ledger if row["kind"] == "decision")
  yield (
    f"The orchestrator looked {looks.total()} times ({counts or 'none yet'}), carried out "
    f"{_count(made[True], 'decision')} and made {_count(made[False], 'other')} that it did not "
    "carry out."
  )
  for number, event in enumerate(events, 1):
    if event.kind == "done":
      yield f"Event {number}, step {event.step:,}: {event.what}, because of {event.cause}."


def _count(number: int, word: str) -> str:
  return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _time(run: RunRecord) -> Iterator[str]:
  wall = float(run.column("goodput/wall_secs").values.sum())
  if wall:
    names = [n for n in run.columns if n.startswith("goodput/") and n.endswith("_secs")]
    parts = {n: float(run.columns[n].values.sum()) for n in names if n != "goodput/wall_secs"}
    most = sorted(parts.items(), key=lambda part: -part[1])[:3]
    said = [f"{n.removeprefix('goodput/').removesuffix('_secs')} {s / wall:.0%}" for n, s in most]
    yield f"Of {duration(wall)} of wall time: {', '.join(said)}."
  yield f"It took {device_hours(run)}."
