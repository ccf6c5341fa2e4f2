"""Datasets meet the mesh: which rows this process loads, and where they go."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.data.rows.blocks import SHORT, sample_blocks
from ats_jax.data.rows.contract import Rows, TrainRows
from ats_jax.data.rows.loader import Batches, TrainBatches, eval_batches
from ats_jax.data.sources import EvalSet
from ats_jax.sharding.apply import num_shards
from ats_jax.sharding.mesh import local_rows, to_global
from ats_jax.sharding.rules import under_this_plan

PROBE_BLOCKS = 64


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


def probe_feed(
  cfg: Config, eval_sets: Sequence[EvalSet], train_set: TrainRows
) -> dict[str, jax.Array]:
  """The orchestrator's probe on the mesh: blocks from all over every evaluation set.

  They are not of the rows that evaluation reports, where a set has enough others. Without any set
  they are of the training rows.

  Returns:
    A batch [parts, rows, seq], a part of which takes no more memory than one of an evaluation.
  """
  mesh = jax.sharding.get_mesh()
  parts, rows = _probe_shape(cfg, num_shards("batch"))
  sets = [(held_out.prefix, held_out.dataset) for held_out in eval_sets] or [("", train_set)]
  shares = np.diff(np.linspace(0, parts * rows, len(sets) + 1).astype(int))
  blocks, shared = [], []
  for (prefix, dataset), count in zip(sets, shares.tolist(), strict=True):
    if not count:  # there are more sets than blocks
      continue
    reported = (
      (cfg.eval.num_batches * cfg.data.batch_size or dataset.info.num_rows) if eval_sets else 0
    )
    some, apart = sample_blocks(dataset, count, reported)
    blocks.append(some)
    shared += [] if apart else [f"{prefix}loss"]
  if shared and eval_sets:
    logging.info(
      "orchestrator: the probe's blocks are also among what evaluation reports (%s): there are too "
      "few other held-out rows. A smaller eval.num_batches or more held-out text would keep them "
      "apart.", ", ".join(shared),
    )  # fmt: skip
  stacked = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
  local = local_rows(mesh, rows)
  return to_global(
    {name: x.reshape(parts, rows, -1)[:, local] for name, x in stacked.items()}, mesh
  )


def _probe_shape(cfg: Config, shards: int) -> tuple[int, int]:
  """Parts, and rows of each: a multiple of `shards`, no more tokens than a micro-batch."""
  seq_len = cfg.data.seq_len
  tokens = cfg.data.batch_size // cfg.step.accum_steps * seq_len
  most = tokens // min(SHORT, seq_len) // shards * shards
  parts = -(-PROBE_BLOCKS // most)
  return parts, -(-PROBE_BLOCKS // (parts * shards)) * shards
