"""Metrics as files of rows in the workdir: JSON lines and CSV, cut where a run goes on."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any, override

import numpy as np
from absl import logging

from ats_jax.metrics.rows import csv_text, jsonl_rows, read_csv
from ats_jax.metrics.writer import MetricWriter, as_numbers, check_names
from ats_jax.store.paths import Log, Path


class JsonlWriter(MetricWriter):
  """One JSON object a line: `{"step": 10, "wall_time": 1.7e9, "train/loss": 3.2}`.

  Every call writes a row, and floats round-trip exactly (a float32 is written as the float64 of the
  same value). JSON has no NaN and no infinities, so those are `null` and named in the row's
  "nonfinite" field: `{"step": 9, ..., "train/loss": null, "nonfinite": {"train/loss": "nan"}}`;
  `read_jsonl` puts them back. Texts are written as strings; other kinds are ignored.
  """

  guarded = False

  def __init__(self, path: Path, *, last_step: int = -1):
    """Opens `path`, first cutting rows of steps after `last_step` and a torn last line."""
    lines = []
    if path.exists():
      rows = list(jsonl_rows(path))
      lines = [line for line, row in rows if row["step"] <= last_step]
      _log_cut(path, len(rows) - len(lines))
    self._file = Log(path, "".join(line + "\n" for line in lines).encode())

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    numbers = as_numbers(scalars)
    odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    fields = {**numbers, **dict.fromkeys(odd)}
    self._write(step, {**fields, "nonfinite": odd} if odd else fields)

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    check_names(texts)
    self._write(step, {name: str(text) for name, text in texts.items()})

  def _write(self, step: int, fields: Mapping[str, Any]) -> None:
    row = {"step": int(step), "wall_time": time.time(), **fields}
    self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

  @override
  def flush(self) -> None:
    self._file.flush()

  @override
  def close(self) -> None:
    self._file.close()


class LayerLog(JsonlWriter):
  """What each sparse layer does, `layers.jsonl`: arrays as nested lists, `null` where not finite.

  `{"step": 10, "wall_time": ..., "moe/load": [[0.12, ...], ...]}`
  """

  def write_arrays(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a row."""
    self._write(step, {name: _finite(np.asarray(a, np.float64)) for name, a in arrays.items()})


class CsvWriter(MetricWriter):
  """A table with a header: step, wall_time, then a column per metric in order of appearance.

  Every call writes a row; a metric it lacks is an empty cell. A metric seen for the first time adds
  a column: the file is rewritten once with the longer header and swapped in atomically, so that
  every row always fits the header. Floats round-trip exactly; the others are `nan`, `inf`, `-inf`.
  Only scalars are written.
  """

  guarded = False

  def __init__(self, path: Path, *, last_step: int = -1):
    """Opens `path`, first cutting rows of steps after `last_step` and a torn last line."""
    self._path = path
    columns, kept_rows = ["step", "wall_time"], []
    if path.exists():
      old_columns, rows = read_csv(path)
      kept_rows = [row for row in rows if int(row[0]) <= last_step]
      if kept_rows:
        columns = old_columns
      _log_cut(path, len(rows) - len(kept_rows))
    self._columns, self._file = (
      columns,
      Log(path, csv_text([columns, *kept_rows]).encode(), one_object=True),
    )

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    numbers = as_numbers(scalars)
    new = [name for name in numbers if name not in self._columns]
    if new:
      self._file.flush()
      _, rows = read_csv(self._path)
      columns = [*self._columns, *new]
      padded = [row + [""] * len(new) for row in rows]
      self._file.rewrite(csv_text([columns, *padded]).encode())
      self._columns = columns
    cells = [numbers.get(name, "") for name in self._columns[2:]]
    self._file.write(csv_text([[int(step), time.time(), *cells]]).encode())

  @override
  def flush(self) -> None:
    self._file.flush()

  @override
  def close(self) -> None:
    self._file.close()


def _log_cut(path: Path, count: int) -> None:
  if count:
    logging.info("%s: cut %d rows of steps that run again", path.name, count)


def _finite(array: np.ndarray) -> Any:
  """Nested lists."""
  values = array.astype(object)
  values[~np.isfinite(array)] = None
  return values.tolist()
