"""Datasets meet the mesh: which rows this process loads, and where they go."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.data.rows.contract import Rows, TrainRows
from ats_jax.data.rows.loader import Batches, TrainBatches, eval_batches
from ats_jax.sharding.mesh import local_rows, to_global
from ats_jax.sharding.rules import under_this_plan


def train_feed(
  cfg: Config,
  dataset: TrainRows,
  position: Mapping[str, Any] | None = None,
  *,
  tells: bool = False,
  on_mesh: bool = False,
) -> TrainBatches:
  """This process's share of the training batches from a position on; None = from the beginning.

  With `tells` the log says what begins in them (`Progress.news`). With `on_mesh` they are global
  arrays, put on the devices before they are asked for.
  """
  micro, mesh = cfg.data.batch_size // cfg.step.accum_steps, jax.sharding.get_mesh()
  return TrainBatches(
    dataset,
    position=position,
    accum_steps=cfg.step.accum_steps,
    batch_size=cfg.data.batch_size,
    local_rows=local_rows(mesh, micro),
    num_workers=cfg.data.num_workers,
    prefetch=cfg.data.prefetch,
    tells=tells,
    place=under_this_plan(functools.partial(to_global, mesh=mesh)) if on_mesh else None,
  )


@contextlib.contextmanager
def training_batches(
  cfg: Config, dataset: TrainRows, position: Mapping[str, Any]
) -> Iterator[Iterator[Batch]]:
  """The training batches from a position on, on the mesh."""
  with train_feed(cfg, dataset, position, on_mesh=True) as batches:
    yield iter(batches)


def eval_feed(cfg: Config, dataset: Rows) -> Batches:
  """This process's share of one evaluation: `eval.num_batches` batches, or all rows once.

  A batch has `data.batch_size` rows, whatever number of micro-batches the devices take it in.
  """
  micro = cfg.data.batch_size // cfg.step.accum_steps
  return eval_batches(
    dataset,
    batch_size=micro,
    local_rows=local_rows(jax.sharding.get_mesh(), micro),
    num_batches=cfg.eval.num_batches * cfg.step.accum_steps,
  )
