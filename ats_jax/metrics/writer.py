"""Metric writers: JSON lines, CSV, TensorBoard and the console behind CLU's `MetricWriter` methods.

`clu.metric_writers` imports TensorFlow, so the base install has writers of the same interface here.
This is the only module that imports CLU, and only when `log.writers` names "clu".
"""

import abc
import contextlib
import fnmatch
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, override

import numpy as np
from absl import logging

from ats_jax import paths
from ats_jax.config.schema import LogConfig
from ats_jax.metrics.rows import csv_text, jsonl_rows, read_csv
from ats_jax.paths import Log, Path

# Names (fnmatch patterns) of values that depend on the machine and the moment, not on the run's
# mathematics: a bitwise comparison of two runs leaves them out.
TIME_KEYS = ("wall_time", "*_secs", "*_per_sec", "*/mfu", "*/mfu_6n", "goodput/*", "memory/*")
TIME_KEYS += ("orchestrator/health",)  # slow steps and waiting for data count in it

# What the console shows of training, and how it calls it.
CONSOLE_LABELS = {
  "train/loss": "loss",
  "train/accuracy": "acc",
  "train/grad_norm": "grad",
  "train/learning_rate": "lr",
  "train/tokens_per_sec": "tok/s",
  "train/mfu": "mfu",
}

_ROW_FIELDS = ("step", "wall_time", "nonfinite")  # of a JSONL row, next to the metrics


def is_time_key(name: str) -> bool:
  """Whether a metric depends on time, speed or memory (`TIME_KEYS`): reruns differ in it."""
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in TIME_KEYS)


class MetricWriter(abc.ABC):
  """A sink for metrics: the methods and signatures of `clu.metric_writers.MetricWriter`.

  Subclass it to log to another place; scalars, `flush` and `close` are required. A kind that a
  writer does not override is ignored by it, as CLU's writers ignore what they cannot show.
  """

  @abc.abstractmethod
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes one number per name: Python, numpy or jax, of shape ()."""

  def write_summaries(
    self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
  ) -> None:
    """Writes tensors for a TensorBoard plugin."""
    del step, values, metadata

  def write_images(self, step: int, images: Mapping[str, Any]) -> None:
    """Writes images `[N, H, W, C]` or `[H, W, C]`."""
    del step, images

  def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
    """Writes videos `[N, T, H, W, C]` or `[T, H, W, C]`."""
    del step, videos

  def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
    """Writes sound `[N, T, C]` in [-1, 1]."""
    del step, audios, sample_rate

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes one text per name."""
    del step, texts

  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, Any],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    """Writes the distribution of each array's elements; 30 buckets unless told."""
    del step, arrays, num_buckets

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Writes a flat mapping of settings; call it once."""
    del hparams

  @abc.abstractmethod
  def flush(self) -> None:
    """Makes everything written so far durable."""

  @abc.abstractmethod
  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards."""


class JsonlWriter(MetricWriter):
  """One JSON object a line: `{"step": 10, "wall_time": 1.7e9, "train/loss": 3.2}`.

  Every call writes a row, and floats round-trip exactly (a float32 is written as the float64 of the
  same value). JSON has no NaN and no infinities, so those are `null` and named in the row's
  "nonfinite" field: `{"step": 9, ..., "train/loss": null, "nonfinite": {"train/loss": "nan"}}`;
  `read_jsonl` puts them back. Texts are written as strings; other kinds are ignored.
  """

  def __init__(self, path: Path, *, last_step: int = -1):
    """Opens `path`, first cutting rows of steps after `last_step` and a torn last line."""
    kept = []
    if path.exists():
      rows = list(jsonl_rows(path))
      kept = [line for line, row in rows if row["step"] <= last_step]
      _log_cut(path, len(rows) - len(kept))
    self._file = Log(path, "".join(line + "\n" for line in kept).encode())

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    numbers = _numbers(scalars)
    odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    fields = {**numbers, **dict.fromkeys(odd)}
    self._write(step, {**fields, "nonfinite": odd} if odd else fields)

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    _check_names(texts)
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

  def __init__(self, path: Path, *, last_step: int = -1):
    """Opens `path`, first cutting rows of steps after `last_step` and a torn last line."""
    self._path = path
    columns, kept = ["step", "wall_time"], []
    if path.exists():
      old_columns, rows = read_csv(path)
      kept = [row for row in rows if int(row[0]) <= last_step]
      if kept:
        columns = old_columns
      _log_cut(path, len(rows) - len(kept))
    self._columns, self._file = columns, Log(path, csv_text([columns, *kept]).encode())

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    numbers = _numbers(scalars)
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


class _EventLogs:
  """Opens event files on a store, for tensorboardX."""

  @staticmethod
  def open(path: str) -> Log:
    return Log(Path(path))


class TensorboardWriter(MetricWriter):
  """TensorBoard event files (`events.out.tfevents.*`) without TensorFlow.

  Scalars, texts, histograms and hparams are written, the other kinds are ignored (CLU's writer has
  images and audio). A histogram holds the finite elements; the number of the others, if any, is
  the scalar `<name>/nonfinite`.
  """

  def __init__(self, directory: Path, *, last_step: int = -1):
    """Starts a new event file; TensorBoard hides earlier events of steps after `last_step`."""
    # Here, because it imports torch where there is one, which takes seconds: by now a train step is
    # being compiled.
    from tensorboardX import event_file_writer, record_writer, summary
    from tensorboardX.proto import event_pb2

    self._summary: Any = summary
    self._proto: Any = event_pb2
    # tensorboardX's SummaryWriter queues events to a thread that its flush() does not wait for, so
    # a killed run would lose rows; its EventsWriter writes at once. The suffix keeps two files
    # begun in one second apart, and in order.
    suffix = f".{time.time_ns() % 10**9:09d}.{os.getpid()}"
    for store in paths.DRIVERS:  # tensorboardX knows some of them, with clients of its own
      record_writer.register_writer_factory(store, _EventLogs)
    self._events = event_file_writer.EventsWriter(str(directory / "events"), filename_suffix=suffix)
    log = self._proto.SessionLog
    self._write(last_step + 1, session_log=log(status=log.START))

  def _write(self, step: int, **content: Any) -> None:
    event = self._proto.Event(step=int(step), wall_time=time.time(), **content)
    self._events.write_event(event)

  def _write_values(self, step: int, summaries: Iterable[Any]) -> None:
    values = [value for part in summaries for value in part.value]
    self._write(step, summary=self._summary.Summary(value=values))

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._write_values(step, (self._summary.scalar(k, v) for k, v in _numbers(scalars).items()))

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    self._write_values(step, (self._summary.text(name, text) for name, text in texts.items()))

  @override
  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, Any],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    for name, value in arrays.items():
      array = np.asarray(value).astype(np.float64).ravel()
      finite = array[np.isfinite(array)]
      if finite.size:
        buckets = (num_buckets or {}).get(name, 30)
        self._write_values(step, [self._summary.histogram(name, finite, bins=buckets)])
      if finite.size < array.size:
        self.write_scalars(step, {f"{name}/nonfinite": array.size - finite.size})

  @override
  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    flat = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in hparams.items()}
    self._write_values(0, self._summary.hparams(flat, {}))

  @override
  def flush(self) -> None:
    self._events.flush()

  @override
  def close(self) -> None:
    self._events.close()


# Python holds back what goes into a file or a pipe.
_print_now = functools.partial(print, flush=True)


class ConsoleWriter(MetricWriter):
  """A short aligned line of the metrics in `CONSOLE_LABELS`, one of all in `eval/`, and texts.

  What would not fit a line is left to the files. Other kinds are ignored.
  """

  def __init__(self, print_line: Callable[[str], None] = _print_now):
    self._print = print_line

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    groups: dict[str, list[str]] = {}
    for name, value in _numbers(scalars).items():
      group, _, short = name.rpartition("/")
      if name in CONSOLE_LABELS or group == "eval":
        label = CONSOLE_LABELS.get(name, short)
        groups.setdefault(group, []).append(f"{label} {_short(value):<9}")
    for group, cells in groups.items():
      self._print(f"step {step:>7}  {group:<5}  {' '.join(cells)}".rstrip())

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
      self._print(f"step {step:>7}  {name}: {text}")

  @override
  def flush(self) -> None:
    """Nothing is held back."""

  @override
  def close(self) -> None:
    """Nothing to close."""


class MultiWriter(MetricWriter):
  """Passes everything to each of several writers, CLU's own among them."""

  def __init__(self, writers: Sequence[MetricWriter]):
    self._writers = tuple(writers)

  def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
    for writer in self._writers:
      getattr(writer, method)(*args, **kwargs)

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._each("write_scalars", step, scalars)

  @override
  def write_summaries(
    self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
  ) -> None:
    self._each("write_summaries", step, values, metadata)

  @override
  def write_images(self, step: int, images: Mapping[str, Any]) -> None:
    self._each("write_images", step, images)

  @override
  def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
    self._each("write_videos", step, videos)

  @override
  def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
    self._each("write_audios", step, audios, sample_rate=sample_rate)

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    self._each("write_texts", step, texts)

  @override
  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, Any],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    self._each("write_histograms", step, arrays, num_buckets)

  @override
  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    self._each("write_hparams", hparams)

  @override
  def flush(self) -> None:
    self._each("flush")

  @override
  def close(self) -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
      for writer in reversed(self._writers):
        stack.callback(writer.close)


def create_writer(
  cfg: LogConfig, workdir: Path, *, resume_step: int | None, is_main: bool = True
) -> MetricWriter:
  """Builds the writers that `cfg.writers` names.

  Args:
    cfg: the log settings.
    workdir: where the files go; created if absent.
    resume_step: the restored step: rows of later steps are cut from the files, as the run writes
      them again. None: nothing was restored, all earlier rows are cut.
    is_main: False on processes other than the first: their writer writes nothing.

  Raises:
    ValueError: "clu" without the tf extra, or a damaged file in the workdir.
  """
  names = [name.strip() for name in cfg.writers.split(",") if name.strip()]
  if not is_main:
    return MultiWriter([])
  workdir = Path(workdir)
  paths.make_folder(workdir)
  last_step = -1 if resume_step is None else resume_step
  make: dict[str, Callable[[], MetricWriter]] = {
    "console": ConsoleWriter,
    "jsonl": lambda: JsonlWriter(workdir / "metrics.jsonl", last_step=last_step),
    "csv": lambda: CsvWriter(workdir / "metrics.csv", last_step=last_step),
    "tensorboard": lambda: TensorboardWriter(workdir, last_step=last_step),
    "clu": lambda: _clu_writer(workdir),
  }
  return MultiWriter([make[name]() for name in dict.fromkeys(names)])


def _clu_writer(workdir: Path) -> MetricWriter:
  """CLU's default writer: absl log and TensorFlow event files, from a thread of its own."""
  if paths.is_remote(workdir):
    raise ValueError(
      f"log.writers: 'clu' writes to local folders only, not to {workdir}; take it out"
    )
  try:
    from clu import metric_writers  # pyright: ignore[reportMissingImports]  # the tf extra
  except ImportError as error:
    raise ValueError(
      f"log.writers: 'clu' needs CLU with TensorFlow and TensorBoard ({error}); "
      "run `pip install 'ats_jax[tf]'` or take 'clu' out of log.writers"
    ) from error
  return cast(MetricWriter, metric_writers.create_default_writer(os.fspath(workdir)))


def _log_cut(path: Path, count: int) -> None:
  if count:
    logging.info("%s: cut %d rows of steps that run again", path.name, count)


def _check_names(names: Iterable[str]) -> None:
  for name in names:
    if name in _ROW_FIELDS or not name.isprintable():
      raise ValueError(
        f"metric name {name!r}: expected one printable line, like 'train/loss', "
        f"that is not a field of the row itself ({', '.join(_ROW_FIELDS)})"
      )


def _numbers(scalars: Mapping[str, Any]) -> dict[str, int | float]:
  """Python numbers of equal value, or ValueError for what is not one number."""
  _check_names(scalars)
  numbers = {}
  for name, value in scalars.items():
    array = np.asarray(value)
    number = array.item() if array.ndim == 0 else None
    if not isinstance(number, bool | int | float):
      raise ValueError(
        f"metric {name!r}: expected one real number, got {array.dtype} of shape {array.shape}; "
        "reduce it first, or use write_histograms for an array"
      )
    numbers[name] = int(number) if isinstance(number, bool) else number
  return numbers


def _short(value: int | float) -> str:
  return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _finite(array: np.ndarray) -> Any:
  """Nested lists."""
  values = array.astype(object)
  values[~np.isfinite(array)] = None
  return values.tolist()
