"""The objective of a training step, and the loss on held-out rows."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config, StepConfig
from ats_jax.data.batch import Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.stats import StackStats, by_layer
from ats_jax.ops.cross_entropy import LossSums, linear_cross_entropy, token_logprobs
from ats_jax.step.compiler import Options

# Of the predictor's loss. Any weight trains the predictor alike, as nothing else does and Adam
# ignores a gradient's scale. It is small so that it does not move the global norm of the clip.
PREDICTOR_WEIGHT = 0.01


class Totals(NamedTuple):
  """Counts of a whole batch, over devices and micro-batches; float32.

  Attributes:
    counted: the number of tokens in the loss.
    real: the number of tokens that are not padding.
    places: the number of tokens that go through a layer which skips some, in training. With static
      routing, which lets a few less through, an upper bound.
    rows: the number of rows with a token that is not padding.
    items: the number of what the loss is a mean over (`Objective.items`).
    scale: what the loss is multiplied with to be differentiated; None = nothing.
  """

  counted: jax.Array
  real: jax.Array
  places: jax.Array
  rows: jax.Array
  items: jax.Array
  scale: jax.Array | None = None

  def scaled(self, loss: jax.Array) -> jax.Array:
    """The loss to differentiate."""
    return loss if self.scale is None else self.scale * loss


def batch_totals(batch: Batch, rules: Pass, objective: "Objective | None" = None) -> Totals:
  """Count a batch [..., seq]; without an objective the loss is a mean over tokens."""
  lengths = jnp.sum(batch["segment_ids"] > 0, axis=-1, dtype=jnp.float32)
  places = rules.places(batch["segment_ids"].shape[-1])
  counted = jnp.sum(batch["loss_mask"])
  return Totals(
    counted=counted,
    real=jnp.sum(lengths),
    places=jnp.sum(jnp.minimum(lengths, places)),
    rows=jnp.sum(lengths > 0, dtype=jnp.float32),
    items=counted if objective is None else objective.items(batch),
  )


class Contribution(NamedTuple):
  """The contribution of one micro-batch; contributions add up over the micro-batches of a batch.

  Attributes:
    loss: the float32 scalar to differentiate.
    sums: any tree of arrays, from which `Objective.means` computes metrics.
    stats: statistics of the sparse layers.
  """

  loss: jax.Array
  sums: Any
  stats: StackStats


class Objective(Protocol):
  """A loss and its metrics.

  The contributions of a batch's micro-batches add up to its loss, so they divide by totals of the
  whole batch. Then any split into micro-batches gives one gradient. Weights that do not train (a
  reference model) belong into a program of their own, whose results are fields of the batch.

  Attributes:
    ITEMS: what the loss is a mean over, as the name of a metric.
    SCORES: names of what `score` sums beside losses and right ones, for metrics.
  """

  ITEMS: ClassVar[str] = "tokens"
  SCORES: ClassVar[tuple[str, ...]] = ()

  @property
  def fields(self) -> Mapping[str, Field]:
    """Fields of a batch beyond `data.batch.FIELDS`."""
    ...

  def __call__(
    self, model: Decoder, batch: Batch, totals: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    """Compute the contribution of one micro-batch.

    Args:
      model: the model, differentiated by its trainable parameters.
      batch: arrays [batch, seq].
      totals: totals of all micro-batches together.
      rules: how sparse layers choose.
      key: the key of this micro-batch, for dropout, noise and random routing.
    """
    ...

  def items(self, batch: Batch) -> jax.Array:
    """Count what the loss of a batch [..., seq] is a mean over."""
    return jnp.sum(batch["loss_mask"])

  def score(
    self, model: Decoder, batch: Batch, step: StepConfig, rules: Pass
  ) -> tuple[tuple[jax.Array, ...], StackStats]:
    """Score held-out rows [batch, seq]: sums over items of losses and of right ones, and the items.

    Then follow sums of `SCORES`. The statistics of the sparse layers are the second result.
    """
    sums, stats = loss_sums(model, batch, step, rules)
    return (sums.cross_entropy, sums.correct, jnp.sum(batch["loss_mask"])), stats

  def means(self, sums: Any, totals: Totals) -> dict[str, jax.Array]:
    """Compute the metrics of a batch by name, float32 scalars.

    They include train/loss, which the reflex and the orchestrator watch. The others of
    pretraining are in docs/reference/metrics.md.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Pretraining(Objective):
  """Cross-entropy of the next token with z-loss and label smoothing; losses of sparse layers.

  Attributes:
    cfg: the resolved config.
  """

  cfg: Config

  @property
  @override
  def fields(self) -> Mapping[str, Field]:
    return {}

  @override
  def __call__(
    self, model: Decoder, batch: Batch, totals: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    sums, stats = loss_sums(model, batch, self.cfg.step, rules, key)
    loss = sums.objective / totals.counted + routing_loss(self.cfg, model, stats, totals)
    return Contribution(loss, sums, stats)

  @override
  def means(self, sums: LossSums, totals: Totals) -> dict[str, jax.Array]:
    return {
      "train/loss": sums.cross_entropy / totals.counted,
      "train/accuracy": sums.correct / totals.counted,
      "train/z": sums.z / totals.counted,
    }


def routing_loss(cfg: Config, model: Decoder, stats: StackStats, totals: Totals) -> jax.Array:
  """The losses of sparse layers for one micro-batch, which add up over the batch.

  They are means over tokens, then over layers, so that its strength depends on neither.

  Args:
    cfg: the resolved config, with the weights of the losses.
    model: the model, whose layout is read.
    stats: statistics of one micro-batch.
    totals: totals of the whole batch.
  """
  moe, mod, loss = cfg.moe, cfg.mod, jnp.zeros(())
  kinds = [kind for segment in model.layout for kind in segment.kinds * segment.repeats]
  num_moe, num_mod = sum(k.moe for k in kinds), sum(k.mod for k in kinds)
  for segment, of_segment in zip(model.layout, stats.segments, strict=True):
    for kind, layers in zip(segment.kinds, of_segment, strict=True):
      if (experts := layers.moe) is not None:
        tokens = num_moe * (totals.places if kind.mod else totals.real)
        loss += moe.aux_loss * jnp.sum(experts.balance) / tokens
        loss += moe.z_loss * jnp.sum(experts.z) / tokens
        loss += moe.sequence_aux_loss * jnp.sum(experts.sequence_balance) / (num_moe * totals.rows)
      if mod.decision == "predictor" and layers.mod is not None:
        share = PREDICTOR_WEIGHT / (num_mod * totals.real)
        loss += share * jnp.sum(layers.mod.predictor_loss)
  return loss


def loss_sums(
  model: Decoder,
  batch: Batch,
  cfg: StepConfig,
  rules: Pass,
  key: jax.Array | None = None,
  *,
  per_token: bool = False,
) -> tuple[LossSums, StackStats]:
  """Sums over the tokens of `batch` (arrays [batch, seq]); divide by the mask's sum for means.

  Args:
    model: the decoder.
    batch: one micro-batch.
    cfg: z_loss, label_smoothing and loss_chunk_tokens.
    rules: how sparse layers choose.
    key: for dropout, noise and random routing; None = none of them.
    per_token: return each token's cross-entropy instead of their sum.

  Returns:
    The sums, and the statistics of the sparse layers.
  """
  x_BTD, stats = final_activations(model, batch, rules, key)
  return sums_at_head(model, x_BTD, batch, cfg, per_token=per_token), stats


def sums_at_head(
  model: Decoder, x_BTD: jax.Array, batch: Batch, cfg: StepConfig, *, per_token: bool = False
) -> LossSums:
  """The sums of `loss_sums`, of what the head reads."""
  return linear_cross_entropy(
    x_BTD,
    model.head_weights(),
    batch["targets"],
    batch["loss_mask"],
    cfg.z_loss,
    cfg.label_smoothing,
    cfg.loss_chunk_tokens,
    model.num.kernels,
    model.cfg.logit_soft_cap,
    per_token,
  )


def target_logprobs(
  model: Decoder, batch: Batch, cfg: StepConfig, rules: Pass, key: jax.Array | None = None
) -> tuple[jax.Array, StackStats]:
  """Log-probability of each target, float32 [batch, seq], differentiable; masked ones included.

  The arguments are those of `loss_sums`; of `cfg` only loss_chunk_tokens is read. Also returns the
  statistics of the sparse layers.
  """
  x_BTD, stats = final_activations(model, batch, rules, key)
  how = cfg.loss_chunk_tokens, model.num.kernels, model.cfg.logit_soft_cap
  logprobs_BT = token_logprobs(x_BTD, model.head_weights(), batch["targets"], *how)
  return logprobs_BT, stats


def final_activations(
  model: Decoder, batch: Batch, rules: Pass, key: jax.Array | None
) -> tuple[jax.Array, StackStats]:
  """What the head reads, [batch, seq, d_model], and the statistics of the sparse layers."""
  return model(
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids_BT=batch["segment_ids"],
    rules=rules,
    key=key,
  )


def make_eval_step(
  cfg: Config, options: Options | None = None, objective: Objective | None = None
) -> jax.stages.Wrapped:
  """Return the jitted `(model, batch [batch, seq], rules, layers=False) -> float32[3]`.

  The three are sums over tokens: cross-entropy in nats, correct predictions, counted tokens; with
  an `objective` what its `score` returns. With `layers` its further sums follow, and two numbers
  for each layer that skips tokens: first of each the tokens that went through it, then of each all
  tokens. `rules` say how sparse layers choose and what is in 8 bits
  (`Program.rules`); `options` are of the compiler.
  """
  scorer = Pretraining(cfg) if objective is None else objective

  @functools.partial(jax.jit, static_argnames=("rules", "layers"), compiler_options=options or None)
  def eval_step(model: Decoder, batch: Batch, rules: Pass, layers: bool = False) -> jax.Array:
    assert not rules.training, "training's routing sees the future"
    of_items, stats = scorer.score(model, batch, cfg.step, rules)
    of_all = jnp.stack(of_items if layers else of_items[:3])
    if not layers or stats.depth_L is None:
      return of_all
    mod = by_layer(stats, model.layout, "mod")
    return jnp.concatenate([of_all, mod.routed, mod.tokens])

  return eval_step
