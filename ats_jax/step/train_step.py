"""One optimizer update."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.ops.cross_entropy import LossSums
from ats_jax.step.loss import Batch, loss_sums
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import DROPOUT, TrainState

# Names of the float32 vector that a step returns, in order.
METRICS = (
  "train/loss",  # plain cross-entropy, nats per token
  "train/accuracy",
  "train/z",  # mean squared logsumexp of the logits
  "train/grad_norm",  # before clipping
  "train/update_norm",
  "train/param_norm",
  "train/learning_rate",
  "train/tokens",  # that counted in the loss
)


def make_train_step(cfg: Config, tx: optax.GradientTransformation) -> jax.stages.Wrapped:
  """Return the jitted step `(state, batch [accum, batch, seq]) -> (state, metrics)`.

  The state is donated. The metrics are one float32 vector, named by `METRICS`.
  """

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    num_tokens = jnp.sum(batch["loss_mask"])
    key = jax.random.fold_in(jax.random.fold_in(state.key, DROPOUT), state.step)
    sums, grads = sums_and_grads(cfg, state.model, batch, num_tokens, key)

    params: Any = state.model  # optax has no type for "any pytree"
    directions, opt_state = tx.update(grads, state.opt_state, params)
    lr = learning_rate(cfg, state.step)
    move = lambda p, d: (p.astype(jnp.float32) - lr * d).astype(p.dtype)
    model = jax.tree.map(move, state.model, directions)
    follow = lambda e, p: e + (1.0 - cfg.optimizer.ema_decay) * (p.astype(e.dtype) - e)
    ema = None if state.ema is None else jax.tree.map(follow, state.ema, model)

    metrics = (
      sums.cross_entropy / num_tokens,
      sums.correct / num_tokens,
      sums.z / num_tokens,
      norm(grads),
      lr * norm(directions),
      norm(model),
      lr,
      num_tokens,
    )
    return TrainState(state.step + 1, model, opt_state, ema, state.key), jnp.stack(metrics)

  return jax.jit(train_step, donate_argnums=0)


def check_finite(step: int, metrics: jax.Array) -> None:
  """Before a checkpoint, which would displace good weights: see that `step` left finite ones.

  Raises:
    FloatingPointError: if it did not; its own loss, from the weights before it, may have been.
  """
  weights = float(np.asarray(metrics)[METRICS.index("train/param_norm")])
  if not math.isfinite(weights):
    raise FloatingPointError(
      f"the norm of the weights is {weights} after step {step}, which was not saved. Lower "
      "optimizer.learning_rate, or look at the data (python -m ats_jax.data stats)."
    )


def norm(tree: Any) -> jax.Array:
  """The Euclidean norm of all leaves together; summed in float32, whatever their dtype."""
  return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def sums_and_grads(
  cfg: Config, model: Decoder, batch: Batch, num_tokens: jax.Array, key: jax.Array
) -> tuple[LossSums, Any]:
  """Accumulate loss sums and gradients of the token-mean objective over the micro-batches.

  Each micro-batch contributes its sum of token losses, and the division is by the token count of
  the whole batch, so any split into micro-batches gives one gradient.
  """

  def objective(model: Decoder, micro: Batch, micro_key: jax.Array):
    dropout_key = micro_key if cfg.model.dropout else None
    sums = loss_sums(model, micro, cfg.step, dropout_key)
    return sums.objective / num_tokens, sums

  grad = jax.grad(objective, has_aux=True)

  def micro_step(carry, micro_and_index):
    micro, index = micro_and_index
    grads, sums = grad(model, micro, jax.random.fold_in(key, index))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return jax.tree.map(jnp.add, carry, (sums, grads)), None

  accum = batch["tokens"].shape[0]
  if accum == 1:  # no second copy of the gradients
    grads, sums = grad(model, {k: v[0] for k, v in batch.items()}, jax.random.fold_in(key, 0))
    return sums, grads
  zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), model)
  start = (LossSums(*(jnp.zeros(()) for _ in LossSums._fields)), zeros)
  (sums, grads), _ = jax.lax.scan(micro_step, start, (dict(batch), jnp.arange(accum)))
  return sums, grads
