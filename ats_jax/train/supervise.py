"""The supervisor of a run, and what the run's loop offers it. Imported by runs that have one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ats_jax.checkpoint import abstract_like, workdir
from ats_jax.data.batch import POSITION
from ats_jax.data.rows.origin import Origin, origin_of
from ats_jax.orchestrator.ports import NextUpdates
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.train.feed import training_batches
from ats_jax.train.probe_rows import probe_feed
from ats_jax.train.run import Run


def open_supervisor(run: Run, snapshots: Snapshots) -> Supervisor:
  """A supervisor with a probe that is not trained on; `start` begins."""
  abstract = abstract_like(run.program.init(abstract=True), jax.sharding.get_mesh())
  probe, domains = probe_feed(
    run.cfg, run.eval_sets, run.train_set, cuts=run.program.objective.ITEMS == "tokens"
  )
  return Supervisor(
    run.program,
    probe,
    run.folder / workdir.DECISIONS,
    run.writer.write_scalars,
    lambda: run.checkpoints.restore_latest(abstract),
    run.goodput.summary,
    snapshots,
    SupervisedLoop(run),
    domains=domains,
  )


@dataclasses.dataclass
class SupervisedLoop:
  """The training loop as its supervisor sees it: `orchestrator.ports.Loop` of an open run."""

  run: Run

  def position(self) -> dict[str, Any]:
    """The loop's part of a checkpoint's `extra`."""
    return self.run.position()

  def origin(self, row: int) -> Origin:
    """Where a training row of the run comes from."""
    return origin_of(self.run.train_set, row)

  def ahead(self, saved: Mapping[str, Any] | None = None) -> NextUpdates:
    """Functions that make the updates after `saved`, or the next ones, on their batches."""
    run = self.run
    position = (saved or run.position())[POSITION]
    batches = lambda: training_batches(run.cfg, run.train_set, position)
    wide = run.goodput.marking(run.last_step(fp8=False)) if run.cfg.precision.fp8 else None
    return NextUpdates(run.goodput.marking(run.last_step()), batches, wide)
