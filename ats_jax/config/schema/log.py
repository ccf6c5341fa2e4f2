"""The section `log`."""

import dataclasses
from typing import Any

from ats_jax import extensions
from ats_jax.config.schema.setting import Condition, setting, when

_OF_FILES = {"console", "jsonl", "csv", "tensorboard", "clu"}
# What of `writers` puts a run in a project: services, and whatever is registered by extensions.
IN_PROJECTS = Condition(
  "log.writers",
  "a writer to a service in log.writers, such as wandb",
  lambda names: not _OF_FILES.issuperset(names),
)


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What is written and shown."""

  every_steps: int = setting(10, "steps between metric rows", low=1, resume="free")
  writers: tuple[str, ...] = setting(
    ("console", "jsonl", "csv", "tensorboard"),
    "where metrics go: console, jsonl, csv, tensorboard; clu, wandb, mlflow, trackio (each needs "
    "an extra, docs/reference/metrics.md); or those of `extensions`",
    resume="free",
  )
  project: str = setting(
    "ats_jax",
    "project of W&B and trackio, experiment of MLflow, that a run is put in",
    resume="free",
    needs=IN_PROJECTS,
  )
  level: str = setting(
    "info",
    "least severe lines that are shown and kept in log.txt; 'debug' = those of libraries too",
    choices=("debug", "info", "warning", "error"),
    resume="free",
  )
  progress: bool = setting(True, "a progress bar with ETA on a terminal", resume="free")
  profile_step: int = setting(
    0,
    "write a profiler trace of 3 steps from here to workdir/profile; 0 = none",
    low=0,
    resume="free",
  )
  profile_every: int = setting(
    0,
    "steps from the begin of a trace to that of the next one; 0 = there is one",
    low=0,
    resume="free",
    needs=when("log.profile_step"),
  )

  def check(self, cfg: Any) -> None:
    """Refuse a writer that is none, unless an extension may bring it that is not loaded yet."""
    for name in self.writers:
      if name not in extensions.writers and extensions.are_loaded(cfg.extensions):
        raise ValueError(extensions.writers.unknown(name))
