"""The writers of a run, made of its settings."""

import contextlib

from ats_jax.config.schema import LogConfig
from ats_jax.extensions import writers
from ats_jax.metrics.guarded import Guarded
from ats_jax.metrics.writer import MetricWriter, MultiWriter, Opening
from ats_jax.store import paths
from ats_jax.store.paths import Path


def create_writer(
  cfg: LogConfig, workdir: Path, *, resume_step: int | None, is_main: bool = True, run: str = ""
) -> MetricWriter:
  """Builds the writers that `cfg.writers` names.

  Args:
    cfg: the log settings.
    workdir: folder of the files; created if absent.
    resume_step: the restored step: rows of later steps are cut from the files, as the run writes
      them again. None: nothing was restored, all earlier rows are cut.
    is_main: False on processes other than the first: their writer writes nothing.
    run: which run it is, for sinks that go on where it stopped.

  Raises:
    ValueError: a writer that there is not, that lacks an extra or cannot be opened, or a damaged
      file in the workdir.
  """
  if not is_main:
    return MultiWriter([])
  workdir = Path(workdir)
  paths.make_folder(workdir)
  opening = Opening(workdir, run, -1 if resume_step is None else resume_step, cfg.project)
  with contextlib.ExitStack() as opened:  # if one cannot be opened, the others are closed
    made = []
    for name in dict.fromkeys(cfg.writers):
      writer = writers.find(name)(opening)
      if getattr(writer, "guarded", False):  # CLU's own have no such thing
        writer = Guarded(name, writer)
      made.append(writer)
      opened.callback(writer.close)
    opened.pop_all()
  return MultiWriter(made)
