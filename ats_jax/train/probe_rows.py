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
  block_len = min(SHORT, seq_len)
  most, blocks = tokens // block_len // shards * shards, num_blocks(cfg, block_len)
  parts = -(-blocks // most)
  return parts, -(-blocks // (parts * shards)) * shards
