"""The step's metrics on their way to the writers: read an interval late: the host never waits."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np
from absl import logging

from ats_jax.metrics.files import LayerLog
from ats_jax.metrics.host_copy import start_copy
from ats_jax.metrics.memory import memory_metrics
from ats_jax.metrics.progress import ProgressBar
from ats_jax.metrics.throughput import Throughput
from ats_jax.metrics.watcher import Watcher
from ats_jax.metrics.writer import MetricWriter

Arrays = dict[str, jax.Array]
# What follows from the metrics and the arrays of a step, by name; None = a metric is left out.
Derive = Callable[[int, Mapping[str, float], Mapping[str, np.ndarray]], Mapping[str, float | None]]


class StepLog(Watcher):
  """Takes the vector that each step returns; writes every n-th of them, one interval late.

  By then the device has long computed it: the loop does not wait, and stays at most one interval
  ahead of the device. A thread waits for each logged step, to know when it was done. Only the
  first step of a process is waited for in the loop, to time it.
  """

  def __init__(
    self,
    writer: MetricWriter,
    throughput: Throughput,
    progress: ProgressBar,
    every_steps: int,
    layers: LayerLog | None = None,
    *,
    derive: Derive | None = None,
    raises: bool = True,
  ):
    """Set where metrics go.

    Args:
      writer: gets a row for each step that `every_steps` divides.
      throughput: measures the speed between those rows.
      progress: is told of steps; the newest row comes to it as to the other writers.
      every_steps: steps between rows.
      layers: gets the arrays of sparse layers at the same steps.
      derive: gives further metrics of a row.
      raises: whether a loss that is not finite ends the run; not if somebody mends it.
    """
    self._writer = writer
    self._throughput = throughput
    self._progress = progress
    self._every_steps = every_steps
    self._layers = layers
    self._derive = derive
    self._raises = raises
    self._clipped: list[float] = []
    self._began: float | None = time.perf_counter()
    self._waiter = ThreadPoolExecutor(1, thread_name_prefix="steplog")
    self._pending: tuple[int, Sequence[str], Arrays, Future[tuple[np.ndarray, float]]] | None = None

  def after(self, step: int, state: Any, metrics: Any) -> Any:
    """Take over the `StepMetrics` of a step; see `Watcher`.

    Raises:
      FloatingPointError: if the loss of the row that is written now is not finite.
    """
    vector, layers = metrics.values, metrics.layers
    if self._began is not None:
      vector.block_until_ready()
      logging.info("first step done %.2f s after the run was ready", self._since_start())
      self._throughput.start(step)
    if step % self._every_steps == 0:
      start_copy((vector, layers))
      self._write()
      self._pending = (step, metrics.names, layers, self._waiter.submit(_wait, vector))
    else:
      self._progress.update(step)
    return state

  @contextlib.contextmanager
  def pause(self, step: int, name: str) -> Iterator[None]:
    """Write the pending row and make all rows durable first: a checkpoint has the rows up to it.

    Raises:
      FloatingPointError: if the loss of the row that is written is not finite.
    """
    del step, name
    self._write()
    self._writer.flush()
    if self._layers is not None:
      self._layers.flush()
    yield

  def summary(self) -> dict[str, float]:
    """`train/clipped`, the share of the logged steps whose gradient was clipped, where it is."""
    return {"train/clipped": float(np.mean(self._clipped))} if self._clipped else {}

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self._waiter.shutdown()

  def _since_start(self) -> float:
    assert self._began is not None
    secs, self._began = time.perf_counter() - self._began, None
    return secs

  def _write(self) -> None:
    if self._pending is None:
      return
    step, names, layers, future = self._pending
    self._pending = None
    vector, done = future.result()
    metrics = dict(zip(names, vector.tolist(), strict=True))
    if self._raises and not math.isfinite(metrics["train/loss"]):
      raise FloatingPointError(
        f"train/loss is {metrics['train/loss']} at step {step}. Lower optimizer.learning_rate, or "
        "look at the data (python -m ats_jax data stats). No checkpoint holds such weights."
      )
    metrics["train/perplexity"] = math.exp(min(metrics["train/loss"], 700.0))
    arrays = jax.device_get(layers)
    if self._derive is not None:
      known = {**metrics, **self._derive(step, metrics, arrays)}
      metrics = {name: value for name, value in known.items() if value is not None}
    if "train/clipped" in metrics:
      self._clipped.append(metrics["train/clipped"])
    metrics |= self._throughput.read(step, done)
    metrics |= memory_metrics()
    self._writer.write_scalars(step, metrics)
    if arrays and self._layers is not None:
      self._layers.write_arrays(step, arrays)
      self._writer.write_histograms(step, histograms(arrays))
    self._progress.update(step)


def histograms(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The arrays of sparse layers as distributions.

  Of an array by layer and expert, one for each layer, `moe/load/layer_00`: its spread over experts.
  Of an array by layer, one: its spread over layers. `mod/depths` is a distribution itself.
  """
  by_name = {}
  for name, array in arrays.items():
    if array.ndim == 2:
      by_name |= {f"{name}/layer_{number:02d}": row for number, row in enumerate(array)}
    elif name != "mod/depths":
      by_name[name] = array
  return by_name


def _wait(vector: jax.Array) -> tuple[np.ndarray, float]:
  """The values, and when they were there."""
  values = np.asarray(vector)
  return values, time.monotonic()
