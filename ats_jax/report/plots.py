"""The figures of one run: which metrics are shown together, and where its time went."""

from collections.abc import Sequence

import numpy as np

from ats_jax.metrics.progress import PHASES
from ats_jax.report.columns import Column
from ats_jax.report.events import Event
from ats_jax.report.figures import Figure, Lines, Table, is_wide, number, series
from ats_jax.report.maps import heat_maps
from ats_jax.report.read import RunRecord
from ats_jax.report.shown import NATS, PLOTS, Plot

BUCKETS = 400  # parts of a series, each with its least and its greatest value; shared by the runs
LEAST_BUCKETS = 30
MOST_COLUMNS = 120  # of a map by step; shared alike


def figures_of(run: RunRecord, events: Sequence[Event], buckets: int = BUCKETS) -> list[Figure]:
  """The figures of one run that it has something for."""
  marks = tuple(i for i, event in enumerate(events) if event.kind in ("done", "resumed"))
  loss, *others = PLOTS
  plots = [_lines(run, plot, marks, buckets) for plot in (loss, *by_name(run), *others)]
  found = [
    *plots,
    goodput(run),
    step_times(run),
    *profiles(run),
    *heat_maps(run, max(1, MOST_COLUMNS * buckets // BUCKETS)),
  ]
  return [one for one in found if one is not None]


def _lines(run: RunRecord, plot: Plot, marks: tuple[int, ...], buckets: int) -> Lines | None:
  """A plot of a run; None if the run has none of its metrics."""
  found = tuple(
    series(words, column, buckets, marked=name.startswith("eval/"))
    for name, words in plot.names.items()
    if len((column := run.column(name)).values)
  )
  if not found:
    return None
  places = [x for one in found for x in (one.x[0], one.x[-1])]
  ends = sorted({min(places), max(places)})
  found += tuple(
    series(words, Column.of(ends, column.values[-1:].repeat(len(ends))), buckets)._replace(
      level=True
    )
    for name, words in plot.levels.items()
    if len((column := run.column(name)).values)
  )
  return Lines(
    plot.title,
    plot.about,
    plot.unit,
    found,
    log=plot.log and is_wide(found),
    events=marks if plot.marks else (),
    phases=phases(run) if plot.shades else (),
  )


def phases(run: RunRecord) -> tuple[tuple[str, float, float], ...]:
  """Stretches of the learning rate's phases, each to the last row that names it."""
  steps, values = run.column("progress/phase")
  if not len(values):
    return ()
  cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
  ends = [0.0, *(float(steps[cut - 1]) for cut in cuts[1:-1]), float(steps[-1])]
  return tuple((PHASES[int(values[cut])], ends[i], ends[i + 1]) for i, cut in enumerate(cuts[:-1]))


def by_name(run: RunRecord) -> list[Plot]:
  """Losses of named sources and evaluation sets, whose metrics a run has names for."""
  of = lambda family: {
    name: name.split("/")[1]
    for name in run.columns
    if name.startswith(family) and name.endswith("/loss") and name.count("/") == 2
  }
  probes = {
    name: f"probe: {name.split('/')[1] if name.count('/') == 2 else 'all'}"
    for name in run.columns
    if name.startswith("orchestrator/") and name.endswith("probe_loss")
  }
  return [
    Plot("Training loss by source", "Of each named source of the mixture.", NATS, of("train/")),
    Plot(
      "Evaluations by name, and the orchestrator's probe",
      "Loss of each named evaluation set, and of the fixed held-out rows that the orchestrator "
      "looks at.",
      NATS,
      of("eval/") | probes,
    ),
  ]


def goodput(run: RunRecord) -> Table | None:
  """Where the wall time of the starts that ended went."""
  totals = {
    name.removeprefix("goodput/").removesuffix("_secs"): float(column.values.sum())
    for name, column in run.columns.items()
    if name.startswith("goodput/") and name.endswith("_secs")
  }
  wall = totals.pop("wall", 0.0)
  if not wall:
    return None
  parts = sorted(totals.items(), key=lambda part: -part[1])
  ended = len(run.column("goodput/wall_secs").values)
  return Table(
    "Where the time went",
    f"Wall time of the starts that ended by themselves, {ended} of {max(run.starts, ended)}; each "
    "moment belongs to one category.",
    ("category", "#seconds", "#share"),
    tuple((name, round(secs, 1), number(secs / wall)) for name, secs in parts),
    share="#share",
  )


def step_times(run: RunRecord) -> Table | None:
  """What a step takes, by the newest start that ended."""
  known = (
    ("median", "train/step_secs_p50"),
    ("90th percentile", "train/step_secs_p90"),
    ("slowest", "train/step_secs_max"),
  )
  rows = [
    (word, round(1e3 * run.performance[name], 2)) for word, name in known if name in run.performance
  ]
  if not rows:
    return None
  return Table("A step", "Means of logging intervals, in the newest start that ended.",
               ("step", "#milliseconds"), tuple(rows))  # fmt: skip


def profiles(run: RunRecord) -> list[Table]:
  """What the profiler saw: the longest kernels of the newest trace, and the devices in each."""
  if not run.profiles:
    return []
  newest = run.profiles[-1]
  words = lambda one: f"{one['step']:,} to {one['step'] + one['steps'] - 1:,}"
  left = newest["num_kernels"] - len(newest["kernels"])
  about = (
    f"Of steps {words(newest)}; shares are of the time of all kernels, on all devices of the first "
    f"process{f', and {left:,} shorter ones are left out' if left else ''}. "
    "TensorBoard and ui.perfetto.dev show the trace."
  )
  rows = tuple(
    (kernel["name"], kernel["calls"], number(1e3 * kernel["secs"]), number(kernel["share"]))
    for kernel in newest["kernels"]
  )
  columns = ("kernel", "#calls", "#milliseconds", "#share")
  found = [Table("Longest kernels", about, columns, rows, share="#share")]
  percent = lambda secs, span: f"{secs / span['secs']:.1%}"
  rows = tuple(
    (words(one), span["gpu"], number(1e3 * span["secs"]), percent(span["idle"], span),
     percent(span["sending"], span), percent(span["exposed"], span))
    for one in run.profiles for span in one["devices"]
  )  # fmt: skip
  if rows:
    about = "Idle: nothing ran. Exposed: collectives ran with nothing beside them."
    columns = ("steps", "device", "#milliseconds", "#idle", "#collectives", "#exposed collectives")
    found.append(Table("Devices in traces", about, columns, rows))
  return found
