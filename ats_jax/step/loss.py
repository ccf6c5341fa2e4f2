"""The loss of one micro-batch, and log-probabilities of its targets."""

import jax

from ats_jax.config.schema import StepConfig
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.stats import StackStats
from ats_jax.ops.cross_entropy import LossSums, linear_cross_entropy, token_logprobs


def loss_sums(
  model: Decoder, batch: Batch, cfg: StepConfig, rules: Pass, key: jax.Array | None = None
) -> tuple[LossSums, StackStats]:
  """Sums over the tokens of `batch` (arrays [batch, seq]); divide by the mask's sum for means.

  Args:
    model: the decoder.
    batch: one micro-batch.
    cfg: z_loss, label_smoothing and loss_chunk_tokens.
    rules: how sparse layers choose.
    key: for dropout, noise and random routing; None = none of them.

  Returns:
    The sums, and the statistics of the sparse layers.
  """
  x_BTD, stats = _read(model, batch, rules, key)
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


def target_logprobs(
  model: Decoder, batch: Batch, cfg: StepConfig, rules: Pass, key: jax.Array | None = None
) -> tuple[jax.Array, StackStats]:
  """Log-probability of each target, float32 [batch, seq], differentiable; masked ones included.

  Args:
    model: the decoder.
    batch: one micro-batch.
    cfg: loss_chunk_tokens.
    rules: how sparse layers choose.
    key: for dropout, noise and random routing; None = none of them.

  Returns:
    The log-probabilities, and the statistics of the sparse layers.
  """
  x_BTD, stats = _read(model, batch, rules, key)
  logprobs_BT = token_logprobs(
    x_BTD, model.head_weights(), batch["targets"], cfg.loss_chunk_tokens, model.num.kernels
  )
  return logprobs_BT, stats


def _read(
  model: Decoder, batch: Batch, rules: Pass, key: jax.Array | None
) -> tuple[jax.Array, StackStats]:
  return model(
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids_BT=batch["segment_ids"],
    rules=rules,
    key=key,
  )
