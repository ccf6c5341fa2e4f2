"""Loss on held-out rows."""

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.step.loss import Batch, loss_sums


def make_eval_step(cfg: Config) -> jax.stages.Wrapped:
  """Return the jitted `(model, batch [batch, seq]) -> float32[3]`.

  The three are sums over tokens: cross-entropy in nats, correct predictions, counted tokens.
  """

  @jax.jit
  def eval_step(model: Decoder, batch: Batch) -> jax.Array:
    sums = loss_sums(model, batch, cfg.step)
    return jnp.stack([sums.cross_entropy, sums.correct, jnp.sum(batch["loss_mask"])])

  return eval_step
