"""The rows of the orchestrator's probe. Imported by runs that have one."""

from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from ats_jax.config.schema import Config
from ats_jax.data.rows.blocks import SHORT, sample_blocks
from ats_jax.data.rows.contract import TrainRows
from ats_jax.data.sources import EvalSet
from ats_jax.orchestrator.signals.probe import num_blocks
from ats_jax.sharding.apply import num_shards
from ats_jax.sharding.mesh import local_rows, to_global


def probe_feed(
  cfg: Config, eval_sets: Sequence[EvalSet], train_set: TrainRows, *, cuts: bool = True
) -> tuple[dict[str, jax.Array], tuple[str, ...]]:
  """The orchestrator's probe on the mesh: blocks from all over every evaluation set.

  They are not of the rows that evaluation reports, where a set has enough others. Without any set
  they are of the training rows. Unless `cuts` they are whole rows.

  Returns:
    A batch [parts, rows, seq], a part of which takes no more memory than one of an evaluation; and
    of each part the name of its set, "main" for the validation split.
  """
  mesh, block_len = (
    jax.sharding.get_mesh(),
    min(SHORT, cfg.data.seq_len) if cuts else cfg.data.seq_len,
  )
  count = num_blocks(cfg, block_len)
  sets = [(each.name or "main", each.prefix, each.dataset) for each in eval_sets]
  sets = sets[:count] or [("main", "", train_set)]
  parts, rows = _shape_of_each(cfg, -(-count // len(sets)), block_len, num_shards("batch"))
  blocks, shared = [], []
  for _, prefix, dataset in sets:
    reported = (
      (cfg.eval.num_batches * cfg.data.batch_size or dataset.info.num_rows) if eval_sets else 0
    )
    some, apart = sample_blocks(dataset, parts * rows, reported, block_len)
    blocks.append(some)
    shared += [] if apart else [f"{prefix}loss"]
  if shared and eval_sets:
    logging.info(
      "orchestrator: the probe's blocks are also among what evaluation reports (%s): there are too "
      "few other held-out rows. A smaller eval.num_batches or more held-out text would keep them "
      "apart.", ", ".join(shared),
    )  # fmt: skip
  stacked = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
  local, shape = local_rows(mesh, rows), (len(sets) * parts, rows, -1)
  batch = to_global({name: x.reshape(shape)[:, local] for name, x in stacked.items()}, mesh)
  return batch, tuple(name for name, _, _ in sets for _ in range(parts))


def _shape_of_each(cfg: Config, count: int, block_len: int, shards: int) -> tuple[int, int]:
  """Parts of a set of `count` blocks, and rows of each: a multiple of `shards`.

  No part has more tokens than a micro-batch.
  """
  tokens = cfg.data.batch_size // cfg.step.accum_steps * cfg.data.seq_len
  most = tokens // block_len // shards * shards
  parts = -(-count // most)
  return parts, -(-count // (parts * shards)) * shards
