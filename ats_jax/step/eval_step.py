"""Loss on held-out rows."""

import functools

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.step.compiler import Options
from ats_jax.step.loss import loss_sums


def make_eval_step(cfg: Config, options: Options | None = None) -> jax.stages.Wrapped:
  """Return the jitted `(model, batch [batch, seq], rules) -> float32[3]`.

  The three are sums over tokens: cross-entropy in nats, correct predictions, counted tokens.
  `rules` say how sparse layers choose and what is in 8 bits (`Program.rules`); `options` are of the
  compiler.
  """

  @functools.partial(jax.jit, static_argnames="rules", compiler_options=options or None)
  def eval_step(model: Decoder, batch: Batch, rules: Pass) -> jax.Array:
    assert not rules.training, "training's routing sees the future"
    sums, _ = loss_sums(model, batch, cfg.step, rules)
    return jnp.stack([sums.cross_entropy, sums.correct, jnp.sum(batch["loss_mask"])])

  return eval_step
