"""Services that runs are compared in: Weights & Biases, MLflow, trackio. Each is an extra.

Where they send to is for their own variables to say (WANDB_MODE, MLFLOW_TRACKING_URI,
TRACKIO_SPACE_ID, ...). Each goes on where the same run stopped.
"""

import contextlib
import html
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, override

import numpy as np

from ats_jax.metrics.writer import MetricWriter, Opening, as_numbers
from ats_jax.store import paths
from ats_jax.store.secrets import masked_values

BUCKETS = 30
# Limits of MLflow.
MLFLOW_METRICS = 1000  # in a call
MLFLOW_PARAMS = 100  # in a call
MLFLOW_CHARACTERS = 6000  # of a value


class WandbWriter(MetricWriter):
  """Weights & Biases: numbers, texts, histograms, settings. `WANDB_MODE=offline` sends nothing.

  The step is a metric of its own, as W&B drops what is logged for a step before its newest one,
  which a run that goes back to a checkpoint does.
  """

  def __init__(self, opening: Opening):
    self._wandb = wandb = _library("wandb")
    self.errors = (OSError, wandb.Error)
    folder = None if paths.is_remote(opening.folder) else os.fspath(opening.folder)
    try:
      with _masked_arguments():  # W&B keeps the command line
        self._run = wandb.init(
          project=opening.project, id=opening.run or None, name=_name(opening), resume="allow",
          dir=folder,
        )  # fmt: skip
    except self.errors as error:
      raise _not_opened("wandb", error, "Run `wandb login`, or set WANDB_MODE=offline") from error
    self._run.define_metric("step")
    self._run.define_metric("*", step_metric="step")

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._log(step, as_numbers(scalars))

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    page = lambda text: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
    self._log(step, {name: page(text) for name, text in texts.items()})

  @override
  def write_histograms(
    self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
  ) -> None:
    histograms = _histograms(arrays, num_buckets)
    self._log(step, {name: self._wandb.Histogram(np_histogram=pair) for name, pair in histograms})

  @override
  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    self._run.config.update(dict(hparams), allow_val_change=True)

  @override
  def flush(self) -> None:
    """It sends by itself."""

  @override
  def close(self) -> None:
    self._run.finish()

  def _log(self, step: int, values: Mapping[str, Any]) -> None:
    if values:
      self._run.log({"step": step, **values})


class MlflowWriter(MetricWriter):
  """MLflow: numbers, texts (as artifacts) and settings (as parameters).

  Without MLFLOW_TRACKING_URI it keeps them in the workdir, in mlflow.db.
  """

  def __init__(self, opening: Opening):
    self._mlflow = mlflow = _library("mlflow")
    self.errors = (OSError, mlflow.MlflowException)
    address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
    if not address:
      if paths.is_remote(opening.folder):
        raise ValueError(
          f"log.writers: 'mlflow' cannot keep its data base on a store, {opening.folder}. Set "
          "MLFLOW_TRACKING_URI, or take it out."
        )
      folder = os.path.abspath(opening.folder)
      address, artifacts = f"sqlite:///{folder}/mlflow.db", f"file://{folder}/mlflow"
    try:
      self._client = mlflow.MlflowClient(address)
      self._id = self._found_or_new(opening, artifacts)
    except self.errors as error:
      raise _not_opened("mlflow", error, "Look at MLFLOW_TRACKING_URI") from error

  def _found_or_new(self, opening: Opening, artifacts: str | None) -> str:
    client = self._client
    experiment = client.get_experiment_by_name(opening.project)
    number = experiment and experiment.experiment_id
    number = number or client.create_experiment(opening.project, artifact_location=artifacts)
    runs = client.search_runs([number], f"tags.ats_jax_run = '{opening.run}'", max_results=1)
    if opening.run and runs:
      client.update_run(runs[0].info.run_id, status="RUNNING")
      return runs[0].info.run_id
    new = client.create_run(number, tags={"ats_jax_run": opening.run}, run_name=_name(opening))
    return new.info.run_id

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
    rows = [metric(name, float(x), now, step) for name, x in as_numbers(scalars).items()]
    for first in range(0, len(rows), MLFLOW_METRICS):
      self._client.log_batch(self._id, metrics=rows[first : first + MLFLOW_METRICS])

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
      self._client.log_text(self._id, text, f"{name}/{step}.txt")

  @override
  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Parameters cannot be changed: of a run that goes on, those that are there stay."""
    known = self._client.get_run(self._id).data.params
    param = self._mlflow.entities.Param
    new = [
      param(name, str(value)[:MLFLOW_CHARACTERS])
      for name, value in hparams.items()
      if name not in known
    ]
    for first in range(0, len(new), MLFLOW_PARAMS):
      self._client.log_batch(self._id, params=new[first : first + MLFLOW_PARAMS])

  @override
  def flush(self) -> None:
    """Nothing is held back."""

  @override
  def close(self) -> None:
    self._client.set_terminated(self._id)


class TrackioWriter(MetricWriter):
  """Trackio: numbers, texts, settings; on this machine unless TRACKIO_SPACE_ID names a Space.

  What it cannot send it keeps and says so itself.
  """

  def __init__(self, opening: Opening):
    self._trackio = _library("trackio")
    try:
      self._run = self._trackio.init(
        opening.project, name=_name(opening), resume="allow", embed=False, auto_log_gpu=False,
        auto_log_cpu=False,
      )  # fmt: skip
    except (OSError, ValueError) as error:
      raise _not_opened("trackio", error, "Look at TRACKIO_SPACE_ID") from error

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._run.log(as_numbers(scalars), step=step)

  @override
  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    fenced = lambda text: self._trackio.Markdown(f"```\n{text}\n```")
    self._run.log({name: fenced(text) for name, text in texts.items()}, step=step)

  @override
  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    self._run.config.update(hparams)

  @override
  def flush(self) -> None:
    """It sends by itself."""

  @override
  def close(self) -> None:
    self._run.finish()


@contextlib.contextmanager
def _masked_arguments() -> Iterator[None]:
  """Within it, the command line of this process seems to hold no credentials."""
  real = sys.argv
  sys.argv = masked_values(real)
  try:
    yield
  finally:
    sys.argv = real


def _library(name: str) -> Any:
  """Import the library behind a writer; each is the extra of the same name."""
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f"log.writers: {name!r} needs the library {name} ({error}); run "
      f"`pip install 'ats_jax[{name}]'` or take {name!r} out of log.writers."
    ) from error


def _name(opening: Opening) -> str:
  """What a run is shown as: its folder, and what tells it from another in a folder of that name."""
  return f"{opening.folder.name}-{opening.run[:8]}" if opening.run else opening.folder.name


def _not_opened(name: str, error: Exception, advice: str) -> ValueError:
  return ValueError(
    f"log.writers: {name!r} cannot be opened: {error}. {advice}, or take {name!r} out of "
    "log.writers."
  )


def _histograms(
  arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
  """(name, (counts, edges)) of the finite elements; arrays without one are left out."""
  for name, values in arrays.items():
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    if array.size:
      yield name, np.histogram(array, bins=(num_buckets or {}).get(name, BUCKETS))
