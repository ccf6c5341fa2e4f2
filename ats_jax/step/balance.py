"""Sparse layers in a step: their losses, and the buffers that steer them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.moe import MoE
from ats_jax.model.router import CLOSED, Router
from ats_jax.model.stats import MoEStats, StackStats

# Of the predictor's loss. Any weight trains the predictor alike, as nothing else does and Adam
# ignores a gradient's scale. It is small so that it does not move the global norm of the clip.
PREDICTOR_WEIGHT = 0.01
RESCUE_RATE = 0.15  # of the selection bias, where a router has collapsed


def rules_at(cfg: Config, step: int, *, training: bool) -> Pass:
  """The rules of update `step` (0-based), or for using the weights that it left.

  `mod.capacity` is reached over the first `mod.anneal_fraction` of the run, in `mod.rungs` steps.
  """
  mod, length = cfg.mod, cfg.mod.anneal_fraction * cfg.num_steps
  horizon = 0 if training else cfg.data.seq_len
  if step >= length:
    return Pass(training, mod.capacity, horizon)
  rung = int(mod.rungs * step / length)
  ratio = mod.capacity / mod.start_capacity
  return Pass(training, mod.start_capacity * ratio ** (rung / mod.rungs), horizon)


class Totals(NamedTuple):
  """Of a whole batch, over devices and micro-batches; float32.

  Attributes:
    counted: tokens in the loss.
    real: tokens that are no padding.
    places: tokens that training lets through a layer which skips some; with static routing, which
      lets through a few less, a bound.
    rows: with a token that is no padding.
  """

  counted: jax.Array
  real: jax.Array
  places: jax.Array
  rows: jax.Array


def totals(batch: Batch, rules: Pass) -> Totals:
  """Count a batch [..., seq]."""
  lengths = jnp.sum(batch["segment_ids"] > 0, axis=-1, dtype=jnp.float32)
  places = rules.places(batch["segment_ids"].shape[-1])
  return Totals(
    counted=jnp.sum(batch["loss_mask"]),
    real=jnp.sum(lengths),
    places=jnp.sum(jnp.minimum(lengths, places)),
    rows=jnp.sum(lengths > 0, dtype=jnp.float32),
  )


def routing_loss(cfg: Config, model: Decoder, stats: StackStats, whole: Totals) -> jax.Array:
  """What sparse layers add to the objective; over the micro-batches of a batch it adds up.

  Means over tokens, then over layers, so that its strength depends on neither.

  Args:
    cfg: the weights of the losses.
    model: for its layout.
    stats: of one micro-batch.
    whole: the batch's totals.
  """
  moe, mod, loss = cfg.moe, cfg.mod, jnp.zeros(())
  kinds = [kind for segment in model.layout for kind in segment.kinds * segment.repeats]
  num_moe, num_mod = sum(k.moe for k in kinds), sum(k.mod for k in kinds)
  for segment, of_segment in zip(model.layout, stats.segments, strict=True):
    for kind, layers in zip(segment.kinds, of_segment, strict=True):
      if (experts := layers.moe) is not None:
        tokens = num_moe * (whole.places if kind.mod else whole.real)
        loss += moe.aux_loss * jnp.sum(experts.balance) / tokens
        loss += moe.z_loss * jnp.sum(experts.z) / tokens
        loss += moe.sequence_aux_loss * jnp.sum(experts.sequence_balance) / (num_moe * whole.rows)
      if mod.decision == "predictor" and layers.mod is not None:
        share = PREDICTOR_WEIGHT / (num_mod * whole.real)
        loss += share * jnp.sum(layers.mod.predictor_loss)
  return loss


def bias_rate(cfg: Config, step: jax.Array, violation: jax.Array) -> jax.Array:
  """Step of the selection bias.

  A slow bias does not follow the noise of batches, but takes long to undo a collapse: above a
  violation of 1 the rate rises, to `RESCUE_RATE` at 1.25. Not where it is added to scores, which
  lie within 1 of each other.

  Args:
    cfg: `moe.bias_rate`, and `moe.bias_freeze`: over this last share of the run it falls to 0.
    step: int32 scalar, 0-based.
    violation: of a layer, its highest load over the mean, less 1; any shape.
  """
  calm = cfg.moe.bias_rate
  more = max(RESCUE_RATE - calm, 0.0) if cfg.moe.bias_on == "logits" else 0.0
  rate = calm + more * jnp.clip(4.0 * (violation - 1.0), 0.0, 1.0)
  left = (cfg.num_steps - 1 - step) / max(1.0, cfg.moe.bias_freeze * cfg.num_steps)
  return rate * jnp.clip(left, 0.0, 1.0)


def drop_experts(cfg: Config, model: Decoder, rate: jax.Array, key: jax.Array) -> Decoder:
  """A model in which some experts of each layer are chosen by no token.

  Their selection bias is lowered beyond reach: what a token has left is renormalised as ever
  (`moe.renormalize`), and the losses see the same logits. Enough stay for every token: one more
  than `moe.top_k`, counted in any `moe.top_groups` groups.

  Args:
    cfg: `moe`.
    model: not changed.
    rate: probability of each expert, float32 scalar; with 0 the model is the same bit for bit.
    key: of this step; the draw is the same on all devices and for all micro-batches.
  """
  groups, least = cfg.moe.num_groups, -(-(cfg.moe.top_k + 1) // cfg.moe.top_groups)
  model = _copied(model)
  for number, blocks in enumerate(model.segments):
    for place, layer in enumerate(blocks.layers):
      if not isinstance(layer.mlp, MoE):
        continue
      router = layer.mlp.router
      bias = router.bias_E[...]
      is_open = router.is_open()[..., : router.num_slots]
      draw_key = jax.random.fold_in(jax.random.fold_in(key, number), place)
      draw = jnp.where(is_open > 0, jax.random.uniform(draw_key, is_open.shape), -1.0)
      draw_LGS = draw.reshape(len(draw), groups, -1)
      kept = min(least, draw_LGS.shape[-1])
      most = jnp.sort(draw_LGS, axis=-1)[..., -kept, None]  # those that draw more than that stay
      drops = (draw_LGS < jnp.minimum(rate, most)).reshape(draw.shape)
      drops = jnp.pad(drops, ((0, 0), (0, bias.shape[-1] - router.num_slots)))  # no null expert
      router.bias_E[...] = jnp.where(drops, CLOSED, bias)
  return model


def with_buffers(
  cfg: Config,
  model: Decoder,
  stats: StackStats,
  step: jax.Array,
  rules: Pass,
  used: Decoder | None = None,
) -> Decoder:
  """A model with the routers' biases moved against the load, and the thresholds after the scores.

  Args:
    cfg: `moe` and `mod`.
    model: not changed.
    stats: of the whole batch.
    step: int32 scalar, 0-based.
    rules: that the step followed.
    used: what made the step, if that had fewer experts (`drop_experts`); the bias of those rests.
  """
  used = model if used is None else used
  model = _copied(model)
  for blocks, of_segment, were in zip(model.segments, stats.segments, used.segments, strict=True):
    for layer, of_layer, was in zip(blocks.layers, of_segment, were.layers, strict=True):
      if isinstance(layer.mlp, MoE):
        assert of_layer.moe is not None and isinstance(was.mlp, MoE)
        in_use = was.mlp.router.bias_E[...] > CLOSED / 2
        _set_router(cfg, layer.mlp.router, of_layer.moe, step, in_use)
      if layer.depth is not None and cfg.mod.routing == "learned":
        assert of_layer.mod is not None
        for name, value in layer.depth.updated(of_layer.mod, rules.capacity).items():
          getattr(layer.depth, name)[...] = value
  return model


def _copied(model: Decoder) -> Decoder:
  """The same arrays in modules of its own, to be written to."""
  return jax.tree.map(lambda x: x, model)


def _set_router(
  cfg: Config, router: Router, stats: MoEStats, step: jax.Array, in_use: jax.Array
) -> None:
  """Loss-free balance by the error's sign (arXiv:2408.15664), or by the error (2509.01322)."""
  load = stats.load_E / jnp.maximum(jnp.sum(stats.load_E, axis=-1, keepdims=True), 1.0)
  is_open = router.is_open() * in_use
  num_open = jnp.sum(is_open, axis=-1, keepdims=True)
  error = (1.0 - load * num_open) * is_open
  rate = bias_rate(cfg, step, -jnp.min(error, axis=-1, keepdims=True))
  kinds = {"none": jnp.zeros_like, "sign": jnp.sign, "proportional": lambda e: jnp.clip(e, -1, 1)}
  router.bias_E[...] += rate * kinds[cfg.moe.bias_update](error)
  router.load_E[...] = load
