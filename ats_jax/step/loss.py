"""The loss of one micro-batch."""

from collections.abc import Mapping

import jax

from ats_jax.config.schema import StepConfig
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.stats import StackStats
from ats_jax.ops.cross_entropy import LossSums, linear_cross_entropy

Batch = Mapping[str, jax.Array]


def loss_sums(
  model: Decoder, batch: Batch, cfg: StepConfig, rules: Pass, key: jax.Array | None = None
) -> tuple[LossSums, StackStats]:
  """Sums over the tokens of `batch` (arrays [batch, seq]); divide by the mask's sum for means.

  Args:
    model: the decoder.
    batch: tokens, targets, loss_mask, segment_ids, positions.
    cfg: z_loss, label_smoothing and loss_chunk_tokens.
    rules: how sparse layers choose.
    key: for dropout, noise and random routing; None = none of them.

  Returns:
    The sums, and the statistics of the sparse layers.
  """
  x_BTD, stats = model(
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids_BT=batch["segment_ids"],
    rules=rules,
    key=key,
  )
  sums = linear_cross_entropy(
    x_BTD,
    model.head_weights(),
    batch["targets"],
    batch["loss_mask"],
    cfg.z_loss,
    cfg.label_smoothing,
    cfg.loss_chunk_tokens,
    model.num.kernels,
  )
  return sums, stats
