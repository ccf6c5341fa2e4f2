"""Figures as data: lines over steps, maps by layer and step, and tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.metrics.progress import PHASES
from ats_jax.report.events import Event
from ats_jax.report.read import Column, RunRecord
from ats_jax.report.thin import kept

BUCKETS = 400  # parts of a series, each with its least and its greatest value; shared by the runs
LEAST_BUCKETS = 30
LOG_RATIO = 50.0  # greatest over median value from which on an axis is logarithmic
Axis = Callable[[np.ndarray], np.ndarray]


class Series(NamedTuple):
  """A line of a figure.

  Attributes:
    name: as the legend has it.
    x: places of its points, increasing.
    y: values; None where one is not finite.
    low: lower ends of an interval about `y`; () = there is none.
    high: upper ends of it.
    marked: whether each point is marked, as it is one of few.
    facts: of all values before any was left out: count, first, last, least, greatest, nonfinite.
  """

  name: str
  x: tuple[float, ...]
  y: tuple[float | None, ...]
  low: tuple[float | None, ...] = ()
  high: tuple[float | None, ...] = ()
  marked: bool = False
  facts: Mapping[str, Any] = {}


class Lines(NamedTuple):
  """Lines over steps, or over what runs are compared by.

  Attributes:
    title: of the figure.
    about: what it shows and what to look for.
    unit: of the values.
    series: its lines.
    x_name: what `x` counts.
    log: whether the values are shown on a logarithmic axis.
    events: places in the list of the run's events that are marked.
    phases: (name, first x, last x) of the learning rate.
  """

  title: str
  about: str
  unit: str
  series: tuple[Series, ...]
  x_name: str = "step"
  log: bool = False
  events: tuple[int, ...] = ()
  phases: tuple[tuple[str, float, float], ...] = ()
  kind: str = "lines"


class Heat(NamedTuple):
  """Values by row (a layer, or an expert of one) and column (a step, or an expert).

  Attributes:
    title: of the figure.
    about: what it shows and what to look for.
    unit: of the values.
    x: names of the columns.
    rows: names of the rows.
    values: [rows][x]; None where one is not finite.
    x_name: what the columns are.
  """

  title: str
  about: str
  unit: str
  x: tuple[float, ...]
  rows: tuple[str, ...]
  values: tuple[tuple[float | None, ...], ...]
  x_name: str = "step"
  kind: str = "heat"


class Table(NamedTuple):
  """Rows of texts and numbers.

  Attributes:
    title: of the table.
    about: what it shows.
    columns: their names; one that begins with "#" has numbers.
    rows: cells.
    share: the column whose numbers, between 0 and 1, are shown as bars; "" = none.
  """

  title: str
  about: str
  columns: tuple[str, ...]
  rows: tuple[tuple[Any, ...], ...]
  share: str = ""
  kind: str = "table"


class Texts(NamedTuple):
  """Texts under headings."""

  title: str
  about: str
  texts: tuple[tuple[str, str], ...]
  kind: str = "texts"


Figure = Lines | Heat | Table | Texts


def number(value: float) -> float | None:
  """A value as JSON has it: six digits, None where it is not finite."""
  return float(f"{value:.6g}") if math.isfinite(value) else None


def series(
  name: str, column: Column, buckets: int, axis: Axis | None = None, *, marked: bool = False
) -> Series:
  """A column as a line of few points, with facts of all its points."""
  values = column.values
  x = np.asarray(column.steps if axis is None else axis(column.steps), float)
  finite = np.flatnonzero(np.isfinite(values))
  facts: dict[str, Any] = {"count": len(values), "nonfinite": len(values) - len(finite)}
  if len(finite):
    for word, at in (
      ("first", finite[0]),
      ("last", finite[-1]),
      ("least", finite[values[finite].argmin()]),
      ("greatest", finite[values[finite].argmax()]),
    ):
      facts[word] = (number(float(x[at])), number(float(values[at])))
  places = kept(values, buckets)
  return Series(
    name,
    tuple(float(f"{value:.8g}") for value in x[places].tolist()),
    tuple(map(number, values[places].tolist())),
    marked=marked,
    facts=facts,
  )


def lines(
  run: RunRecord,
  title: str,
  about: str,
  unit: str,
  names: Mapping[str, str],
  buckets: int,
  **more: Any,
) -> Lines | None:
  """A figure of metrics, by name of the metric -> name of the line; None if the run has none."""
  found = tuple(
    series(words, column, buckets, marked=name.startswith("eval/"))
    for name, words in names.items()
    if len((column := run.column(name)).values)
  )
  if not found:
    return None
  return Lines(title, about, unit, found, **{"log": is_wide(found), **more})


def is_wide(found: Sequence[Series]) -> bool:
  """Whether values are all positive and some far above the usual."""
  values = [value for one in found for value in one.y if value is not None]
  return bool(values) and min(values) > 0 and max(values) > LOG_RATIO * float(np.median(values))


def figures_of(run: RunRecord, events: Sequence[Event], buckets: int = BUCKETS) -> list[Figure]:
  """The figures of one run that it has something for."""
  marks = tuple(i for i, event in enumerate(events) if event.kind in ("done", "resumed"))
  marked = {"events": marks, "phases": phases(run)}
  found = [
    lines(
      run,
      "Loss",
      "Cross-entropy in nats a token. Shaded are phases of the learning rate; vertical lines are "
      "decisions of the orchestrator and resumed starts.",
      "nats a token",
      {"train/loss": "training", "eval/loss": "validation"},
      buckets,
      **marked,
    ),
    _by_source(run, buckets),
    _named_evaluations(run, buckets),
    lines(
      run,
      "Learning rate",
      "What multiplied the update, and what the schedule alone would have.",
      "",
      {"train/learning_rate": "applied", "train/scheduled_rate": "scheduled"},
      buckets,
      log=False,
      **marked,
    ),
    lines(
      run,
      "Norms of gradient and update",
      "Global norms: of the gradient before clipping, and of the change to the weights.",
      "",
      {"train/grad_norm": "gradient", "train/update_norm": "update"},
      buckets,
      events=marks,
    ),
    lines(
      run,
      "Norm of the weights",
      "Global norm after the update.",
      "",
      {"train/param_norm": "weights"},
      buckets,
    ),
    lines(
      run,
      "Reflex",
      "How far loss and gradients were from what is usual, in standard deviations.",
      "sigmas",
      {"reflex/z_loss": "loss", "reflex/z_grad": "largest of all gradients"},
      buckets,
      log=False,
      events=marks,
    ),
    lines(
      run,
      "What the reflex did",
      "Factors on gradients and rate: 1 where nothing was limited. Left out is 1 for an update "
      "that was not made.",
      "",
      {
        "reflex/grad_scale": "factor on gradients",
        "reflex/rate_scale": "factor on the rate",
        "reflex/skipped": "left out",
      },
      buckets,
      log=False,
    ),
    lines(
      run,
      "Speed",
      "All devices together, without compilation, evaluations and checkpoints.",
      "tokens/s",
      {"train/tokens_per_sec": "tokens/s"},
      buckets,
      log=False,
    ),
    lines(
      run,
      "Utilisation",
      "Model FLOP/s as a share of the devices' peak.",
      "share",
      {"train/mfu": "MFU", "train/mfu_6n": "by 6N + 12LdS"},
      buckets,
      log=False,
    ),
    goodput(run),
    step_times(run),
    lines(
      run,
      "Memory",
      "Of the fullest device, and of the main process.",
      "GiB",
      {
        "memory/device_in_use_gib": "device, in use",
        "memory/device_peak_gib": "device, most so far",
        "memory/device_reserved_gib": "device, reserved",
        "memory/device_limit_gib": "device, limit",
        "memory/host_rss_gib": "host process",
      },
      buckets,
      log=False,
    ),
    *heat_maps(run, buckets),
  ]
  return [one for one in found if one is not None]


def phases(run: RunRecord) -> tuple[tuple[str, float, float], ...]:
  """Stretches of the learning rate's phases, each to the last row that names it."""
  steps, values = run.column("progress/phase")
  if not len(values):
    return ()
  cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
  ends = [0.0, *(float(steps[cut - 1]) for cut in cuts[1:-1]), float(steps[-1])]
  return tuple((PHASES[int(values[cut])], ends[i], ends[i + 1]) for i, cut in enumerate(cuts[:-1]))


def _by_source(run: RunRecord, buckets: int) -> Lines | None:
  names = [n for n in run.columns if n.startswith("train/") and n.count("/") == 2]
  named = {name: name.split("/")[1] for name in names if name.endswith("/loss")}
  return lines(run, "Training loss by source", "Of each named source of the mixture.",
               "nats a token", named, buckets, log=False)  # fmt: skip


def _named_evaluations(run: RunRecord, buckets: int) -> Lines | None:
  names = [n for n in run.columns if n.startswith("eval/") and n.count("/") == 2]
  named = {name: name.split("/")[1] for name in names if name.endswith("/loss")}
  named |= {
    n: f"probe: {n.split('/')[1] if n.count('/') == 2 else 'all'}"
    for n in run.columns
    if n.startswith("orchestrator/") and n.endswith("probe_loss")
  }
  return lines(
    run,
    "Evaluations by name, and the orchestrator's probe",
    "Loss of each named evaluation set, and of the fixed held-out rows that the orchestrator "
    "looks at.",
    "nats a token",
    named,
    buckets,
    log=False,
  )


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
    f"Wall time of {ended} {'start' if ended == 1 else 'starts'} that ended by themselves, of "
    f"{max(run.starts, ended)}; each moment belongs to one category.",
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


MAPS = (
  ("moe/layer_entropy", "Entropy of the routers", "Of a token's probabilities, by layer.", "nats"),
  ("moe/layer_dropped", "Dropped choices", "Share of choices without a place, by layer.", "share"),
  ("moe/layer_tokens", "Tokens of the layers with experts", "By layer.", "tokens"),
  ("mod/layer_routed", "Depth", "Share of tokens that go through each layer which skips some.",
   "share"),
  ("mod/layer_overflow", "Depth without a place", "Share of tokens that were chosen but had none.",
   "share"),
)  # fmt: skip
MOST_ROWS = 128  # of a map of experts by step
MOST_COLUMNS = 120


def heat_maps(run: RunRecord, buckets: int = BUCKETS) -> list[Figure]:
  """What sparse layers did, by layer (those of a kind, from the bottom up) and step."""
  found: list[Heat] = []
  most = max(1, MOST_COLUMNS * buckets // BUCKETS)
  if "moe/load" in run.layers:
    found += _loads(*run.layers["moe/load"], most)
  for name, title, about, unit in MAPS:
    if name in run.layers:
      steps, values = run.layers[name]
      kind = "MoE" if name.startswith("moe/") else "MoD"
      rows = tuple(f"{kind} layer {i}" for i in range(values.shape[1]))
      if np.nan_to_num(values).any():  # a map of zeros shows nothing
        found.append(_heat(title, about, unit, rows, steps, values, most))
  if "mod/depths" in run.layers:
    steps, values = run.layers["mod/depths"]
    rows = tuple(f"{i} of them" for i in range(values.shape[1]))
    about = "Share of tokens by the number of skipping layers that they went through."
    found.append(_heat("Tokens by depth", about, "share", rows, steps, values, most))
  read = max((len(column.steps) for column in run.layers.values()), default=0)
  if run.layer_rows > read:
    note = f" {read} of {run.layer_rows:,} rows of layers.jsonl were read, evenly spaced."
    found = [one._replace(about=one.about + note) for one in found]
  return [*found]


def _loads(steps: np.ndarray, loads: np.ndarray, most: int) -> list[Heat]:
  """The load of experts [steps, layers, experts], relative to an even one."""
  even = loads * loads.shape[2]
  layers, experts = even.shape[1:]
  names = tuple(f"MoE layer {i}" for i in range(layers))
  unit = "times the even share"
  found = [
    _heat("Fullest expert", "Load of the fullest expert of each layer; 1 is even.", unit, names,
          steps, even.max(2), most),
    _heat("Emptiest expert", "Load of the emptiest expert of each layer; 0 is a dead one.", unit,
          names, steps, even.min(2), most),
  ]  # fmt: skip
  if layers * experts <= MOST_ROWS:
    rows = tuple(f"{name}, expert {j}" for name in names for j in range(experts))
    about = "By layer and expert; 1 is even."
    every = even.reshape(len(steps), -1)
    found.append(_heat("Load of each expert", about, unit, rows, steps, every, most))
  last = even[-max(1, len(even) // 10) :].mean(0)
  about = "Mean of the last tenth of the rows, by layer and expert; 1 is even."
  found.append(
    Heat("Load at the end", about, unit, tuple(range(experts)), names, _cells(last), "expert")
  )
  return found


def _heat(
  title: str,
  about: str,
  unit: str,
  rows: tuple[str, ...],
  steps: np.ndarray,
  values: np.ndarray,
  most: int,
) -> Heat:
  """A map of values [steps, rows] in at most so many columns, which are means of neighbours."""
  parts = np.array_split(np.arange(len(steps)), min(len(steps), most))
  means = np.stack([values[part].mean(0) for part in parts], axis=1)
  return Heat(title, about, unit, tuple(int(steps[part[-1]]) for part in parts), rows,
              _cells(means))  # fmt: skip


def _cells(values: np.ndarray) -> tuple[tuple[float | None, ...], ...]:
  """The values of a map in three digits."""
  digits = lambda value: float(f"{value:.3g}") if math.isfinite(value) else None
  return tuple(tuple(map(digits, row)) for row in values.tolist())
