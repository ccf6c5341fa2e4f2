"""What a step reports: names in one place, and how statistics of sparse layers become metrics."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.model.stats import StackStats, by_layer, stack_layers

METRICS = (
  "train/loss",  # plain cross-entropy, nats per token
  "train/accuracy",
  "train/z",  # mean squared logsumexp of the logits
  "train/grad_norm",  # before clipping
  "train/update_norm",
  "train/param_norm",
  "train/learning_rate",  # applied; of a step that is left out, what it would have been made with
  "train/scheduled_rate",
  "train/tokens",  # that counted in the loss
)
MOE_METRICS = (
  "moe/max_violation",  # highest load over the mean, less 1 (arXiv:2408.15664); worst layer
  "moe/min_load",  # lowest load over the mean; worst layer
  "moe/entropy",  # of a token's probabilities, nats
  "moe/confidence",  # highest probability of a token
  "moe/dropped",  # share of choices without a place
  "moe/overflow",  # share of choices that an exchange between devices computed in a further pass
  "moe/null",  # share of choices that fell on null experts
  "moe/balance_loss",  # 1 = balanced
  "moe/z",  # squared logsumexp of the router's logits
  "moe/max_bias",
)
MOD_METRICS = (
  "mod/routed",  # share of tokens that go through a layer which skips some
  "mod/depth",  # layers that a token goes through
  "mod/overflow",  # share of tokens that were chosen but had no place
  "mod/agreement",  # share of tokens for which training's choice and the causal rule agree
  "mod/gate",  # weight of a token that goes through
)
REFLEX_METRICS = (
  "reflex/z_loss",  # sigmas of the loss
  "reflex/z_grad",  # of the logarithm of the norm of a tensor's gradient; the largest
  "reflex/grad_scale",  # what a tensor's gradient was multiplied with; the smallest
  "reflex/shrunk_tensor",  # whose, see `step.tensors.names`
  "reflex/rate_scale",  # what the learning rate was multiplied with
  "reflex/skipped",  # 1 = the update was not made
  "reflex/bucket",
  "reflex/cusum",
  "reflex/broken",  # steps in a row with a loss or gradient that is not finite
  "reflex/held",  # steps in a row whose learning rate was held
  "reflex/wrong",  # tensors that hold, or whose moments hold, what no update can have left
  "reflex/wrong_tensor",  # the first of them
  "reflex/miscounted",  # by how much the optimizer's count of updates was off
  "reflex/step",  # the counter of the state before the update
)


class StepMetrics(NamedTuple):
  """What a step returns beside the state.

  Attributes:
    values: float32 vector, named by `metric_names`.
    layers: arrays of the sparse layers, in order of depth: moe/load [layers, experts] (share of the
      layer's choices), moe/layer_entropy, moe/layer_dropped, moe/layer_tokens, mod/layer_routed,
      mod/layer_overflow [layers], mod/depths [layers + 1] (share of tokens by how many of the
      skipping layers they went through).
  """

  values: jax.Array
  layers: dict[str, jax.Array]


def metric_names(cfg: Config, further: tuple[str, ...] = ()) -> tuple[str, ...]:
  """Names of `StepMetrics.values`, in order; `further` are those of the objective."""
  moe = MOE_METRICS if cfg.moe.num_experts else ()
  mod = MOD_METRICS if cfg.mod.routing != "none" else ()
  reflex = REFLEX_METRICS if cfg.orchestrator.mode != "off" else ()
  return METRICS + moe + mod + reflex + further


def step_metrics(
  cfg: Config,
  model: Decoder,
  stats: StackStats,
  scalars: tuple[jax.Array, ...],
  further: tuple[jax.Array, ...] = (),
) -> StepMetrics:
  """Put a step's metrics together.

  Args:
    cfg: the run.
    model: as the step left it.
    stats: of the whole batch.
    scalars: values of `METRICS`.
    further: values of `REFLEX_METRICS`, if there is a reflex, and of the objective's own.
  """
  values, layers = list(scalars), {}
  for wanted, find in (
    (cfg.moe.num_experts > 0, _moe_metrics),
    (cfg.mod.routing != "none", _mod_metrics),
  ):
    if wanted:
      more, arrays = find(cfg, model, stats)
      values, layers = values + more, layers | arrays
  values += [x.astype(jnp.float32) for x in further]
  return StepMetrics(jnp.stack(values), layers)


def _moe_metrics(
  cfg: Config, model: Decoder, stats: StackStats
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
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
  values = [
    jnp.max(over_mean_LE) - 1.0,
    jnp.min(jnp.where(is_open_LE > 0, over_mean_LE, jnp.inf)),
    jnp.mean(moe.entropy / tokens_L),
    jnp.mean(moe.confidence / tokens_L),
    jnp.mean(moe.dropped / choices_L),
    jnp.mean(moe.overflow / choices_L),
    jnp.mean(jnp.sum(load_LE * null_E, axis=1)),
    jnp.mean(moe.balance / tokens_L),
    jnp.mean(moe.z / tokens_L),
    jnp.max(jnp.abs(bias_LE)),
  ]
  return values, {
    "moe/load": load_LE,
    "moe/layer_entropy": moe.entropy / tokens_L,
    "moe/layer_dropped": moe.dropped / choices_L,
    "moe/layer_tokens": moe.tokens,
  }


def _mod_metrics(
  cfg: Config, model: Decoder, stats: StackStats
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
  assert stats.depth_L is not None
  mod = by_layer(stats, model.layout, "mod")
  tokens_L = jnp.maximum(mod.tokens, 1.0)
  depths = stats.depth_L / jnp.maximum(jnp.sum(stats.depth_L), 1.0)
  always = cfg.model.num_layers - mod.tokens.size
  values = [
    jnp.mean(mod.routed / tokens_L),
    always + jnp.sum(depths * jnp.arange(depths.size)),
    jnp.mean(mod.overflow / tokens_L),
    jnp.mean(mod.agree / tokens_L),
    jnp.mean(mod.gate / jnp.maximum(mod.routed, 1.0)),
  ]
  return values, {
    "mod/layer_routed": mod.routed / tokens_L,
    "mod/layer_overflow": mod.overflow / tokens_L,
    "mod/depths": depths,
  }


def check_finite(step: int, metrics: StepMetrics) -> None:
  """Before a checkpoint, which would displace good weights: see that `step` left finite ones.

  Raises:
    FloatingPointError: if it did not; its own loss, from the weights before it, may have been.
  """
  weights = float(np.asarray(metrics.values)[METRICS.index("train/param_norm")])
  if not math.isfinite(weights):
    raise FloatingPointError(
      f"the norm of the weights is {weights} after step {step}, which was not saved. Lower "
      "optimizer.learning_rate, or look at the data (python -m ats_jax data stats)."
    )
