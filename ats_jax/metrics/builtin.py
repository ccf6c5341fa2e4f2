"""The metric writers that come with this package, by the names that `log.writers` takes.

A writer is registered as a function or class that makes it of a `metrics.writer.Opening`.
"""

import os
from typing import cast

from ats_jax.extensions import writers
from ats_jax.metrics.console import ConsoleWriter
from ats_jax.metrics.files import CsvWriter, JsonlWriter
from ats_jax.metrics.tensorboard import TensorboardWriter
from ats_jax.metrics.writer import MetricWriter, Opening
from ats_jax.store import paths


@writers.register("console")
def console(opening: Opening) -> MetricWriter:
  """Lines on the screen."""
  del opening
  return ConsoleWriter()


@writers.register("jsonl")
def jsonl(opening: Opening) -> MetricWriter:
  """The file metrics.jsonl."""
  return JsonlWriter(opening.folder / "metrics.jsonl", last_step=opening.last_step)


@writers.register("csv")
def csv(opening: Opening) -> MetricWriter:
  """The file metrics.csv."""
  return CsvWriter(opening.folder / "metrics.csv", last_step=opening.last_step)


@writers.register("tensorboard")
def tensorboard(opening: Opening) -> MetricWriter:
  """Event files in the workdir."""
  return TensorboardWriter(opening.folder, last_step=opening.last_step)


@writers.register("clu")
def clu(opening: Opening) -> MetricWriter:
  """CLU's default writer: absl log and TensorFlow event files, from a thread of its own.

  This is the only place that imports CLU.
  """
  if paths.is_remote(opening.folder):
    raise ValueError(
      f"log.writers: 'clu' writes to local folders only, not to {opening.folder}; take it out"
    )
  try:
    from clu import metric_writers  # pyright: ignore[reportMissingImports]  # the tf extra
  except ImportError as error:
    raise ValueError(
      f"log.writers: 'clu' needs CLU with TensorFlow and TensorBoard ({error}); "
      "run `pip install 'ats_jax[tf]'` or take 'clu' out of log.writers"
    ) from error
  return cast(MetricWriter, metric_writers.create_default_writer(os.fspath(opening.folder)))


writers.late("ats_jax.metrics.sinks:WandbWriter", "wandb")
writers.late("ats_jax.metrics.sinks:MlflowWriter", "mlflow")
writers.late("ats_jax.metrics.sinks:TrackioWriter", "trackio")
