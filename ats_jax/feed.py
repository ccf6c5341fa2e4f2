"""Datasets meet the mesh: which rows this process loads."""

import contextlib
from collections.abc import Iterator

import jax

from ats_jax.config.schema import Config
from ats_jax.data.batches import eval_batches, train_batches
from ats_jax.data.dataset import Dataset
from ats_jax.data.loader import Batches
from ats_jax.sharding.mesh import local_rows, to_global


def train_feed(cfg: Config, dataset: Dataset, row: int) -> Batches:
  """This process's share of the training batches from global row `row` on."""
  micro = cfg.data.batch_size // cfg.step.accum_steps
  return train_batches(
    dataset,
    start_row=row,
    accum_steps=cfg.step.accum_steps,
    batch_size=cfg.data.batch_size,
    local_rows=local_rows(jax.sharding.get_mesh(), micro),
    num_workers=cfg.data.num_workers,
    prefetch=cfg.data.prefetch,
  )


@contextlib.contextmanager
def global_feed(
  cfg: Config, dataset: Dataset, row: int
) -> Iterator[Iterator[dict[str, jax.Array]]]:
  """The training batches from global row `row` on, on the mesh."""
  with train_feed(cfg, dataset, row) as batches:
    yield (to_global(batch, jax.sharding.get_mesh()) for batch in batches)


def probe_batch(cfg: Config, dataset: Dataset) -> dict[str, jax.Array] | None:
  """The first micro-batch of `dataset`, on the mesh; None without an orchestrator to use it."""
  if cfg.orchestrator.mode == "off":
    return None
  with eval_feed(cfg, dataset) as batches:
    return to_global(next(batches), jax.sharding.get_mesh())


def eval_feed(cfg: Config, dataset: Dataset) -> Batches:
  """This process's share of one evaluation: `eval.num_batches` batches, or all rows once."""
  micro = cfg.data.batch_size // cfg.step.accum_steps
  return eval_batches(
    dataset,
    batch_size=micro,
    local_rows=local_rows(jax.sharding.get_mesh(), micro),
    num_batches=cfg.eval.num_batches,
  )
