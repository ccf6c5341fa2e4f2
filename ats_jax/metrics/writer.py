"""What takes the metrics of a run: CLU's `MetricWriter` methods without TensorFlow.

`clu.metric_writers` imports TensorFlow, so the base install has an interface of its own with the
same methods. The writers that implement it are registered in `metrics.builtin`.
"""

import abc
import contextlib
import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, override

import numpy as np

from ats_jax.store.paths import Path
from ats_jax.store.secrets import masked_values

# Names (fnmatch patterns) of values that depend on the machine and the moment, not on the run's
# mathematics: a bitwise comparison of two runs leaves them out.
TIME_KEYS = (
  "wall_time",
  "*_secs",
  "*_per_sec",
  "*/mfu",
  "*/mfu_6n",
  "goodput/*",
  "memory/*",
  "hosts/*",
)
TIME_KEYS += ("*/tflops_per_device",)
TIME_KEYS += ("orchestrator/health",)  # slow steps and waiting for data count in it

ROW_FIELDS = ("step", "wall_time", "nonfinite")  # of a JSONL row, next to the metrics


def is_time_key(name: str) -> bool:
  """Whether a metric depends on time, speed or memory (`TIME_KEYS`): reruns differ in it."""
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in TIME_KEYS)


@dataclasses.dataclass(frozen=True)
class Opening:
  """What a writer is made with.

  Attributes:
    folder: the workdir.
    run: which run it is: the same at each start of it.
    last_step: rows of later steps are written again; -1 = the run begins.
    project: `log.project`.
  """

  folder: Path
  run: str = ""
  last_step: int = -1
  project: str = "ats_jax"


class MetricWriter(abc.ABC):
  """A sink for metrics: the methods and signatures of `clu.metric_writers.MetricWriter`.

  Subclass it to log to another place; scalars, `flush` and `close` are required. A kind that a
  writer does not override is ignored by it, as CLU's writers ignore what they cannot show.

  Attributes:
    guarded: whether it works in a thread of its own and is given up where it fails
      (`metrics.guarded`). What a run must not lose works in the loop, and a failure ends the run.
    errors: what a guarded writer raises where the place that it writes to fails.
  """

  guarded: ClassVar[bool] = True
  errors: tuple[type[Exception], ...] = (OSError,)

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


class MultiWriter(MetricWriter):
  """Passes everything to each of several writers, CLU's own among them."""

  guarded = False

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
    self._each("write_hparams", masked_values(dict(hparams)))

  @override
  def flush(self) -> None:
    self._each("flush")

  @override
  def close(self) -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
      for writer in reversed(self._writers):
        stack.callback(writer.close)


def check_names(names: Iterable[str]) -> None:
  """Raise ValueError for a name that no row can have."""
  for name in names:
    if name in ROW_FIELDS or not name.isprintable():
      raise ValueError(
        f"metric name {name!r}: expected one printable line, like 'train/loss', "
        f"that is not a field of the row itself ({', '.join(ROW_FIELDS)})"
      )


def as_numbers(scalars: Mapping[str, Any]) -> dict[str, int | float]:
  """Python numbers of equal value, or ValueError for what is not one number."""
  check_names(scalars)
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
