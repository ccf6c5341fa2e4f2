"""What the folder of a run holds, as plain records; of a live, finished, stopped or killed run."""

import dataclasses
import datetime
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ats_jax.checkpoint import workdir
from ats_jax.metrics.profiler import SUMMARY
from ats_jax.orchestrator.record.ledger import LedgerLine, read_lines, reading
from ats_jax.report.again import Again, as_continued, made_again
from ats_jax.report.columns import EMPTY, Column, read_rows
from ats_jax.report.shown import is_shown
from ats_jax.store import lease, paths
from ats_jax.store.paths import Path
from ats_jax.store.secrets import masked, masked_values

METRICS, LOG, SAMPLES, ANSWERS = "metrics.jsonl", "log.txt", "samples", "answers.json"
MOST_LAYER_ROWS = 240  # rows of layers.jsonl that are read, evenly spaced
MOST_TEXTS, MOST_CHARACTERS = 20, 2000  # samples of a run, and characters of each
_FAILED = re.compile(r"^\S+ \S+ ERROR +the run ended: (.*)$")
_STARTS = re.compile(r"^\S+ \S+ INFO +devices: ")


class State(NamedTuple):
  """How a run stands.

  Attributes:
    word: "finished", "stopped" (by a signal, saved), "live", "failed", "killed" or "no row yet".
    says: the same in a sentence.
  """

  word: str
  says: str


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """All that a report needs of a run.

  Attributes:
    name: its folder, as the user wrote it.
    settings: its settings by dotted name, without credentials.
    metadata: of `metadata.json`; {} = it was not written yet.
    data: parts of what it reads, of `data.json`; [] = it was not written.
    profiles: what each profiler trace came to, by its first step (`metrics.profiler.summary`).
    performance: of `performance.json`, of the newest start that ended; {} = there was none.
    columns: each metric by name, and "wall_time" of all rows.
    samples: (step, text) of what the run generated, the newest last.
    answers: what a fine-tuned run answered before and after, if it says so.
    layers: arrays of sparse layers by name: steps [rows], values [rows, ...].
    layer_rows: rows of `layers.jsonl` beside those that were read.
    ledger: the lines of the orchestrator that count.
    again: steps that were made again, of which columns and layers have what the run continued with.
    log: lines of the log of the first process.
    state: how the run stands.
  """

  name: str
  settings: dict[str, Any]
  metadata: dict[str, Any]
  data: list[dict[str, Any]]
  profiles: list[dict[str, Any]]
  performance: dict[str, Any]
  columns: Mapping[str, Column]
  samples: list[tuple[int, str]]
  answers: list[dict[str, Any]]
  layers: Mapping[str, Column]
  layer_rows: int
  ledger: list[LedgerLine]
  again: list[Again]
  log: list[str]
  state: State

  def column(self, name: str) -> Column:
    """A metric; empty if the run has no such."""
    return self.columns.get(name, EMPTY)

  @property
  def step(self) -> int:
    """The last step that has a row."""
    return max((int(c.steps[-1]) for c in self.columns.values() if len(c.steps)), default=0)

  @property
  def num_steps(self) -> int:
    """Steps of the whole run."""
    return int(self.settings["num_steps"])

  @property
  def devices(self) -> int:
    """How many devices share the work; 1 as long as it is not known."""
    return int(self.metadata.get("device_count", 1))

  @property
  def kind(self) -> str:
    """What a device is."""
    return ", ".join(self.metadata.get("device_kinds", ())) or "unknown device"

  @property
  def starts(self) -> int:
    """How often the run was started, by its log."""
    return sum(bool(_STARTS.match(line)) for line in self.log)


def read_run(text: str) -> RunRecord:
  """Read the folder of a run, local or on a store.

  Raises:
    ValueError: if it holds no run, or one of its files is damaged; names the file.
  """
  folder = paths.parse(text)
  if not (folder / workdir.CONFIG).exists():
    raise ValueError(
      f"{text} holds no run ({workdir.CONFIG} is missing). Name the --workdir of a run."
    )
  settings = masked_values(workdir.stored_settings(folder))
  metadata = masked_values(_json(folder / workdir.METADATA, dict))
  path = folder / METRICS
  columns, texts = read_rows(path, is_shown) if path.exists() else ({}, [])
  layers, layer_rows = _layers(folder / workdir.LAYERS)
  decisions = folder / workdir.DECISIONS
  ledger = read_lines(decisions) if decisions.exists() else []
  again = made_again(folder, ledger)
  log = _lines(folder / LOG)
  return RunRecord(
    name=masked(text.rstrip("/")),
    settings=settings,
    metadata=metadata,
    data=masked_values(_json(folder / workdir.DATA, dict)).get("parts", []),
    profiles=_profiles(folder / workdir.PROFILES),
    performance=_json(folder / workdir.PERFORMANCE, dict),
    columns=as_continued(columns, again) | _probed(decisions, ledger),
    samples=_samples(folder / SAMPLES, texts),
    answers=_json(folder / SAMPLES / ANSWERS, list),
    layers=as_continued(layers, again),
    layer_rows=layer_rows,
    ledger=ledger,
    again=again,
    log=log,
    state=_state(settings, metadata, columns, log, is_live=lease.is_held(folder / workdir.LOCK)),
  )


def _probed(path: Path, ledger: list[LedgerLine]) -> dict[str, Column]:
  """Losses of the probe at the steps of the weights; rows of metrics have those of the looks."""
  found: dict[str, dict[int, float]] = {}
  for row in ledger:
    if row["kind"] == "check":
      with reading(path, row.number):
        if row["stale"]:  # of weights that a rollback has replaced since
          continue
        for name, loss in row["reading"]["held"].items():
          found.setdefault(name, {})[row["reading"]["step"]] = float(loss)
  return {
    "/".join(filter(None, ("orchestrator", name, "probe_loss"))): Column.of(
      list(of.keys()), list(of.values())
    )
    for name, of in found.items()
  }


def _json(path: Path, kind: type) -> Any:
  """The value of a file of JSON; an empty one where there is no file."""
  if not path.exists():
    return kind()
  try:
    value = paths.parse_json(paths.read(path))
  except ValueError as error:
    raise ValueError(f"{path} cannot be read: {error}. Restore it, or remove it.") from error
  if not isinstance(value, kind):
    raise ValueError(f"{path} holds {value!r:.40}, not a {kind.__name__}. Restore or remove it.")
  return value


def _lines(path: Path) -> list[str]:
  return paths.read_log(path).decode("utf-8", "replace").splitlines() if path.exists() else []


def _layers(path: Path) -> tuple[dict[str, Column], int]:
  """Arrays by name, of rows that are evenly spaced; and how many rows there are."""
  if not path.exists():
    return {}, 0
  lines = paths.read_log(path).split(b"\n")[:-1]  # a torn last line is left out
  picked = np.unique(np.linspace(0, len(lines) - 1, MOST_LAYER_ROWS).round().astype(int))
  found: dict[str, tuple[list[int], list[np.ndarray]]] = {}
  for number in picked if lines else ():
    try:
      row = paths.parse_json(lines[number])
      step = row["step"]
      arrays = {n: np.asarray(v, np.float64) for n, v in row.items() if isinstance(v, list)}
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f"{path}:{number + 1}: not a row of arrays ({error}). Restore or remove that line."
      ) from error
    for name, values in arrays.items():
      steps, rows = found.setdefault(name, ([], []))
      if rows and rows[-1].shape != values.shape:  # experts were added: earlier rows do not fit
        steps.clear()
        rows.clear()
      steps.append(step)
      rows.append(values)
  return {name: Column.of(*both) for name, both in found.items()}, len(lines)


def _samples(folder: Path, texts: list[tuple[int, str, str]]) -> list[tuple[int, str]]:
  """What the run generated, by step; long texts are cut."""
  found = {step: text for step, _, text in texts}
  for path in folder.glob("*.txt") if folder.exists() else ():
    if path.stem.isdecimal():
      found.setdefault(int(path.stem), paths.read(path).decode("utf-8", "replace"))
  cut = lambda text: text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " [...]"
  return [(step, cut(text)) for step, text in sorted(found.items())][-MOST_TEXTS:]


def _profiles(folder: Path) -> list[dict[str, Any]]:
  found = [_json(path, dict) for path in folder.glob(f"*/{SUMMARY}")] if folder.exists() else []
  return sorted(found, key=lambda one: one["step"])


def _state(
  settings: Mapping[str, Any],
  metadata: Mapping[str, Any],
  columns: Mapping[str, Column],
  log: list[str],
  *,
  is_live: bool,
) -> State:
  """How the run stands: by its lock, the last row of its newest start, and the end of its log."""
  of = int(settings["num_steps"])
  step = max((int(column.steps[-1]) for column in columns.values()), default=0)
  where = f"at step {step:,} of {of:,}"
  if is_live:
    return State("live", f"A process trains it now: it is {where}.")
  ended, wall = columns.get("goodput/wall_secs", EMPTY), columns.get("wall_time", EMPTY)
  times = wall.values[wall.steps == ended.steps[-1]] if len(ended.steps) else wall.values[:0]
  if len(times) and times[-1] >= started(metadata):  # by the newest start
    if step >= of:
      return State("finished", f"It finished {where}.")
    return State("stopped", f"It was stopped {where}, and saved.")
  starts = [number for number, line in enumerate(log) if _STARTS.match(line)]
  for line in log[starts[-1] if starts else 0 :]:
    if failed := _FAILED.match(line):
      return State("failed", f"It ended with an error {where}: {failed[1]}")
  if not columns and "jsonl" not in settings["log.writers"]:
    writers = ",".join(settings["log.writers"])
    return State("no row yet", f"It writes no {METRICS}, by log.writers={writers}.")
  if not columns:
    return State("no row yet", "It has written no row of metrics, and no process trains it.")
  return State("killed", f"It has no end, and no process trains it: it was killed or lost {where}.")


def started(metadata: Mapping[str, Any]) -> float:
  """When the newest start of a run began, in Unix seconds; 0 = nothing says it."""
  text = metadata.get("time")
  return datetime.datetime.fromisoformat(text).timestamp() if isinstance(text, str) else 0.0
