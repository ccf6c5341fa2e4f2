"""Datasets meet the mesh: which rows this process loads, and where they go."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ats_jax.config.schema import Config
from ats_jax.data.dataset import Dataset
from ats_jax.data.loader import Batches, TrainBatches, eval_batches
from ats_jax.sharding.mesh import local_rows, to_global

POSITION = "position"  # where a checkpoint keeps that of the training data


def train_feed(
  cfg: Config, dataset: Dataset, position: Mapping[str, Any] | None = None
) -> TrainBatches:
  """This process's share of the training batches from a position on; None = from the beginning."""
  micro = cfg.data.batch_size // cfg.step.accum_steps
  return TrainBatches(
    dataset,
    position=position,
    accum_steps=cfg.step.accum_steps,
    batch_size=cfg.data.batch_size,
    local_rows=local_rows(jax.sharding.get_mesh(), micro),
    num_workers=cfg.data.num_workers,
    prefetch=cfg.data.prefetch,
  )


@contextlib.contextmanager
def upcoming(
  cfg: Config, dataset: Dataset, position: Mapping[str, Any]
) -> Iterator[Iterator[dict[str, jax.Array]]]:
  """The training batches from a position on, on the mesh."""
  with train_feed(cfg, dataset, position) as batches:
    yield (to_global(batch, jax.sharding.get_mesh()) for batch in batches)


def eval_feed(cfg: Config, dataset: Dataset) -> Batches:
  """This process's share of one evaluation: `eval.num_batches` batches, or all rows once."""
  micro = cfg.data.batch_size // cfg.step.accum_steps
  return eval_batches(
    dataset,
    batch_size=micro,
    local_rows=local_rows(jax.sharding.get_mesh(), micro),
    num_batches=cfg.eval.num_batches,
  )
