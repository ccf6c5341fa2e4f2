"""TensorBoard event files without TensorFlow."""

import os
import textwrap
import time
from collections.abc import Iterable, Mapping
from typing import Any, override

import numpy as np

from ats_jax.metrics.writer import MetricWriter, as_numbers
from ats_jax.store import paths
from ats_jax.store.paths import Log, Path

INDENT = " " * 4  # of code in Markdown
# Metrics that the page of hyper-parameters shows of each run.
RESULTS = ("eval/loss", "eval/accuracy", "train/loss", "train/tokens_per_sec", "train/mfu")


class _EventLogs:
  """Opens event files on a store, for tensorboardX."""

  @staticmethod
  def open(path: str) -> Log:
    return Log(Path(path))


class TensorboardWriter(MetricWriter):
  """TensorBoard event files (`events.out.tfevents.*`) without TensorFlow.

  Scalars, texts, histograms and hparams are written, the other kinds are ignored (CLU's writer has
  images and audio). A text is shown as it is, not as Markdown: its lines are indented by four. The
  settings are the hyper-parameters of the HPARAMS page, beside the newest value of each of
  `RESULTS`, and the text `config`. A histogram holds the finite elements; the number of the others,
  if any, is the scalar `<name>/nonfinite`.
  """

  guarded = False

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
    self._first_step = last_step + 1
    self._ended: Any = None  # says that the hyper-parameters' run is over
    log = self._proto.SessionLog
    self._write(self._first_step, session_log=log(status=log.START))

  def _write(self, step: int, **content: Any) -> None:
    event = self._proto.Event(step=int(step), wall_time=time.time(), **content)
    self._events.write_event(event)

  def _write_values(self, step: int, summaries: Iterable[Any]) -> None:
    values = [value for part in summaries for value in part.value]
    self._write(step, summary=self._summary.Summary(value=values))

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._write_values(step, (self._summary.scalar(k, v) for k, v in as_numbers(scalars).items()))

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    shown = {name: textwrap.indent(text, INDENT, lambda line: True) for name, text in texts.items()}
    self._write_values(step, (self._summary.text(name, text) for name, text in shown.items()))

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
    *begun, self._ended = self._summary.hparams(flat, dict.fromkeys(RESULTS))
    self._write_values(0, begun)
    lines = "\n".join(f"{name} = {value!r}" for name, value in hparams.items())
    self.write_texts(self._first_step, {"config": lines})

  @override
  def flush(self) -> None:
    self._events.flush()

  @override
  def close(self) -> None:
    if self._ended is not None:
      self._write_values(0, [self._ended])
    self._events.close()
