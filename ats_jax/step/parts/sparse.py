"""Sparse layers in a step: updates of routers' buffers, and metrics."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.moe import MoE
from ats_jax.model.random import Purpose, fold
from ats_jax.model.router import CLOSED, Router
from ats_jax.model.stats import MoEStats, StackStats, by_layer, stack_layers
from ats_jax.step.core import Metrics, Part, UpdateResult
from ats_jax.step.state import TrainState

RESCUE_RATE = 0.15  # of the selection bias, where a router has collapsed


@dataclasses.dataclass(frozen=True)
class ExpertDropout(Part):
  """Drops experts for a step, with the probability that the supervisor sets.

  Attributes:
    cfg: the resolved config.
  """

  cfg: Config

  @override
  def used_model(self, state: TrainState, model: Decoder) -> Decoder:
    assert state.control is not None, "the state was begun without the reflex"
    key = fold(state.key, Purpose.EXPERT_DROPOUT, state.step)
    return drop_experts(self.cfg, model, state.control.expert_dropout, key)


@dataclasses.dataclass(frozen=True)
class Sparse(Part):
  """Updates biases and thresholds after an update, and reports routing metrics.

  Attributes:
    cfg: the resolved config.
  """

  cfg: Config

  @override
  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    step, control = result.before.step, state.control
    scale = 1.0 if control is None else control.balance_scale
    model = with_buffers(
      self.cfg, state.model, result.stats, step, result.rules, result.used, scale
    )
    return dataclasses.replace(state, model=model)

  @override
  def report(
    self, result: UpdateResult, state: TrainState, written: Any
  ) -> tuple[TrainState, Metrics]:
    del written
    return state, sparse_metrics(self.cfg, state.model, result.stats)


def sparse_metrics(cfg: Config, model: Decoder, stats: StackStats) -> Metrics:
  """Compute the metrics of the sparse layers, scalars and arrays by layer.

  Args:
    cfg: the resolved config.
    model: the model after the step.
    stats: statistics of the whole batch.
  """
  of_experts = _moe_metrics(cfg, model, stats) if cfg.moe.num_experts else {}
  return of_experts | (_mod_metrics(cfg, model, stats) if cfg.mod.routing != "none" else {})


def bias_rate(
  cfg: Config, step: jax.Array, violation: jax.Array, scale: jax.Array | float = 1.0
) -> jax.Array:
  """Step of the selection bias.

  A slow bias does not follow the noise of batches, but takes long to undo a collapse: above a
  violation of 1 the rate rises, to `RESCUE_RATE` at 1.25. Not where it is added to scores, which
  lie within 1 of each other.

  Args:
    cfg: `moe.bias_rate`, and `moe.bias_freeze`: over this last share of the run it falls to 0.
    step: int32 scalar, 0-based.
    violation: the highest load of a layer over the mean load, less 1; any shape.
    scale: multiplies the rate, but where a router has collapsed.
  """
  calm = cfg.moe.bias_rate * scale
  more = jnp.maximum(RESCUE_RATE - calm, 0.0) if cfg.moe.bias_on == "logits" else 0.0
  rate = calm + more * jnp.clip(4.0 * (violation - 1.0), 0.0, 1.0)
  left = (cfg.num_steps - 1 - step) / max(1.0, cfg.moe.bias_freeze * cfg.num_steps)
  return rate * jnp.clip(left, 0.0, 1.0)


def drop_experts(cfg: Config, model: Decoder, rate: jax.Array, key: jax.Array) -> Decoder:
  """Return a model in which no token chooses some experts of each layer.

  Their selection bias is lowered beyond reach; the weights of a token's other experts are
  renormalised as usual (`moe.renormalize`), and the losses see the same logits. Enough
  experts stay for every token: one more than `moe.top_k`, counted in any `moe.top_groups` groups.

  Args:
    cfg: the resolved config.
    model: the model, which is not changed.
    rate: the probability of each expert, float32 scalar; with 0 the model is bit-identical.
    key: the key of this step; the draw is the same on all devices and for all micro-batches.
  """
  groups, least = cfg.moe.num_groups, -(-(cfg.moe.top_k + 1) // cfg.moe.top_groups)
  model = _copy(model)
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
  scale: jax.Array | float = 1.0,
) -> Decoder:
  """Return a model with updated buffers: biases by the load, thresholds by the scores.

  Args:
    cfg: the resolved config.
    model: the model, which is not changed.
    stats: statistics of the whole batch.
    step: int32 scalar, 0-based.
    rules: the rules of the step.
    used: the model of the passes, if experts were dropped (`drop_experts`); their biases stay.
    scale: multiplies the rate of biases.
  """
  used = model if used is None else used
  model = _copy(model)
  for blocks, of_segment, were in zip(model.segments, stats.segments, used.segments, strict=True):
    for layer, of_layer, was in zip(blocks.layers, of_segment, were.layers, strict=True):
      if isinstance(layer.mlp, MoE):
        assert of_layer.moe is not None and isinstance(was.mlp, MoE)
        in_use = was.mlp.router.bias_E[...] > CLOSED / 2
        _set_router(cfg, layer.mlp.router, of_layer.moe, step, in_use, scale)
      if layer.depth is not None and cfg.mod.routing == "learned":
        assert of_layer.mod is not None
        for name, value in layer.depth.updated(of_layer.mod, rules.capacity).items():
          getattr(layer.depth, name)[...] = value
  return model


def _copy(model: Decoder) -> Decoder:
  """Copy the modules of a model but not their arrays, so that buffers can be replaced."""
  return jax.tree.map(lambda x: x, model)


def _set_router(
  cfg: Config,
  router: Router,
  stats: MoEStats,
  step: jax.Array,
  in_use: jax.Array,
  scale: jax.Array | float,
) -> None:
  """Loss-free balance by the error's sign (arXiv:2408.15664), or by the error (2509.01322)."""
  load = stats.load_E / jnp.maximum(jnp.sum(stats.load_E, axis=-1, keepdims=True), 1.0)
  is_open = router.is_open() * in_use
  num_open = jnp.sum(is_open, axis=-1, keepdims=True)
  error = (1.0 - load * num_open) * is_open
  rate = bias_rate(cfg, step, -jnp.min(error, axis=-1, keepdims=True), scale)
  kinds = {"none": jnp.zeros_like, "sign": jnp.sign, "proportional": lambda e: jnp.clip(e, -1, 1)}
  router.bias_E[...] += rate * kinds[cfg.moe.bias_update](error)
  router.load_E[...] = load


def _moe_metrics(cfg: Config, model: Decoder, stats: StackStats) -> Metrics:
  router = lambda number, place: model.segments[number].layers[place].mlp.router
  is_open_LE, bias_LE = stack_layers(
    model.layout, "moe", lambda *at: (router(*at).is_open(), router(*at).bias_E[...])
  )
  moe = by_layer(stats, model.layout, "moe")
  tokens_L = jnp.maximum(moe.tokens, 1.0)
  choices_L = cfg.moe.top_k * tokens_L
  load_LE = moe.load_E / choices_L[:, None]
  over_mean_LE = load_LE * jnp.sum(is_open_LE, axis=1, keepdims=True)
  null_E = jnp.arange(load_LE.shape[1]) >= cfg.moe.num_experts + cfg.moe.spare_experts
  return {
    "moe/max_violation": jnp.max(over_mean_LE) - 1.0,  # arXiv:2408.15664; of the worst layer
    "moe/min_load": jnp.min(jnp.where(is_open_LE > 0, over_mean_LE, jnp.inf)),
    "moe/entropy": jnp.mean(moe.entropy / tokens_L),
    "moe/confidence": jnp.mean(moe.confidence / tokens_L),
    "moe/dropped": jnp.mean(moe.dropped / choices_L),
    "moe/overflow": jnp.mean(moe.overflow / choices_L),
    "moe/null": jnp.mean(jnp.sum(load_LE * null_E, axis=1)),
    "moe/balance_loss": jnp.mean(moe.balance / tokens_L),
    "moe/z": jnp.mean(moe.z / tokens_L),
    "moe/max_bias": jnp.max(jnp.abs(bias_LE)),
    "moe/load": load_LE,
    "moe/layer_entropy": moe.entropy / tokens_L,
    "moe/layer_dropped": moe.dropped / choices_L,
    "moe/layer_tokens": moe.tokens,
  }


def _mod_metrics(cfg: Config, model: Decoder, stats: StackStats) -> Metrics:
  assert stats.depth_L is not None
  mod = by_layer(stats, model.layout, "mod")
  tokens_L = jnp.maximum(mod.tokens, 1.0)
  depths = stats.depth_L / jnp.maximum(jnp.sum(stats.depth_L), 1.0)
  always = cfg.model.num_layers - mod.tokens.size
  return {
    "mod/routed": jnp.mean(mod.routed / tokens_L),
    "mod/depth": always + jnp.sum(depths * jnp.arange(depths.size)),
    "mod/overflow": jnp.mean(mod.overflow / tokens_L),
    "mod/agreement": jnp.mean(mod.agree / tokens_L),
    "mod/gate": jnp.mean(mod.gate / jnp.maximum(mod.routed, 1.0)),
    "mod/layer_routed": mod.routed / tokens_L,
    "mod/layer_overflow": mod.overflow / tokens_L,
    "mod/depths": depths,
  }
