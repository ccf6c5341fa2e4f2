"""The step's metrics on their way to the writers: read an interval late: the host never waits."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import logging

from ats_jax.metrics.memory import memory_metrics
from ats_jax.metrics.progress import Progress
from ats_jax.metrics.throughput import Throughput
from ats_jax.metrics.writer import MetricWriter


class StepLog:
  """Takes the vector that each step returns; writes every n-th of them, one interval late.

  By then the device has long computed it: fetching it costs nothing, and it keeps the host at most
  one interval ahead of the device. Only the first step of a process is waited for, to time it.
  """

  def __init__(
    self,
    names: Sequence[str],
    writer: MetricWriter,
    throughput: Throughput,
    progress: Progress,
    *,
    every_steps: int,
    tokens_per_step: int,
  ):
    """Set where metrics go.

    Args:
      names: of the vector's entries; "train/loss" is one of them.
      writer: gets a row for each step that `every_steps` divides.
      throughput: measures between those rows.
      progress: shows the newest row.
      every_steps: steps between rows.
      tokens_per_step: positions a step processes, padding included; the base of tokens/s.
    """
    self._names = names
    self._writer = writer
    self._throughput = throughput
    self._progress = progress
    self._every_steps = every_steps
    self._tokens_per_step = tokens_per_step
    self._began: float | None = time.perf_counter()
    self._pending: tuple[int, jax.Array] | None = None

  def push(self, step: int, vector: jax.Array) -> None:
    """Hand over the metrics of `step`.

    Raises:
      FloatingPointError: if the loss of the row that is written now is not finite.
    """
    if self._began is not None:
      vector.block_until_ready()
      logging.info("first step done %.2f s after its compilation began", self._since_start())
      self._throughput.start(step, step * self._tokens_per_step)
    if step % self._every_steps == 0:
      vector.copy_to_host_async()
      self._write()
      self._pending = (step, vector)
    else:
      self._progress.update(step)

  @contextlib.contextmanager
  def pause(self, step: int) -> Iterator[None]:
    """Around what is not a step: writes what is pending first, and keeps its time out of the speed.

    Raises:
      FloatingPointError: if the loss of the row that is written is not finite.
    """
    self._write()
    yield
    self._writer.flush()
    self._throughput.start(step, step * self._tokens_per_step)

  def _since_start(self) -> float:
    assert self._began is not None
    secs, self._began = time.perf_counter() - self._began, None
    return secs

  def _write(self) -> None:
    if self._pending is None:
      return
    step, vector = self._pending
    self._pending = None
    metrics = dict(zip(self._names, np.asarray(vector).tolist(), strict=True))
    if not math.isfinite(metrics["train/loss"]):
      raise FloatingPointError(
        f"train/loss is {metrics['train/loss']} at step {step}. Lower optimizer.learning_rate, or "
        "look at the data (python -m ats_jax.data stats). Checkpoints are from before this step."
      )
    metrics["train/perplexity"] = math.exp(min(metrics["train/loss"], 700.0))
    metrics |= self._throughput.read(step, step * self._tokens_per_step)
    metrics |= memory_metrics()
    self._writer.write_scalars(step, metrics)
    self._progress.update(step, metrics)
