"""What a training step minimises, and the loss on held-out rows."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config, StepConfig
from ats_jax.data.batch import Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.stats import StackStats
from ats_jax.ops.cross_entropy import LossSums, linear_cross_entropy, token_logprobs
from ats_jax.step.balance import Totals, routing_loss
from ats_jax.step.compiler import Options


class Contribution(NamedTuple):
  """What one micro-batch adds to that of its batch: all of it adds up over micro-batches.

  Attributes:
    loss: float32 scalar that is differentiated.
    sums: any tree of arrays, from which `Objective.means` makes metrics.
    stats: of the sparse layers.
  """

  loss: jax.Array
  sums: Any
  stats: StackStats


class Objective(Protocol):
  """A loss and its metrics.

  The contributions of a batch's micro-batches add up to its loss, so they divide by totals of the
  whole batch. Then any split into micro-batches gives one gradient. Weights that do not train (a
  reference model) belong into a program of their own, whose results are fields of the batch.
  """

  @property
  def fields(self) -> Mapping[str, Field]:
    """Fields of a batch beyond `data.batch.FIELDS`."""
    ...

  @property
  def names(self) -> tuple[str, ...]:
    """Metrics beyond those of every step, behind which they are reported."""
    ...

  def __call__(
    self, model: Decoder, batch: Batch, whole: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    """The contribution of one micro-batch.

    Args:
      model: differentiated by its trainable parameters.
      batch: arrays [batch, seq].
      whole: totals of all micro-batches together.
      rules: how sparse layers choose.
      key: of this micro-batch, for dropout, noise and random routing.
    """
    ...

  def means(self, sums: Any, whole: Totals) -> tuple[jax.Array, ...]:
    """Values of train/loss, train/accuracy and train/z, and then of `names`; float32 scalars.

    The first is what the reflex and the orchestrator watch.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Pretraining:
  """Cross-entropy of the next token with z-loss and label smoothing; losses of sparse layers.

  Attributes:
    cfg: the resolved config.
  """

  cfg: Config

  @property
  def fields(self) -> Mapping[str, Field]:
    """See `Objective`."""
    return {}

  @property
  def names(self) -> tuple[str, ...]:
    """See `Objective`."""
    return ()

  def __call__(
    self, model: Decoder, batch: Batch, whole: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    """See `Objective`; `sums` are `LossSums`."""
    sums, stats = loss_sums(model, batch, self.cfg.step, rules, key)
    loss = sums.objective / whole.counted + routing_loss(self.cfg, model, stats, whole)
    return Contribution(loss, sums, stats)

  def means(self, sums: LossSums, whole: Totals) -> tuple[jax.Array, ...]:
    """See `Objective`."""
    return (
      sums.cross_entropy / whole.counted,
      sums.correct / whole.counted,
      sums.z / whole.counted,
    )


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
    per_token: give each token's cross-entropy, not their sum.

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
    model.cfg.logit_soft_cap,
    per_token,
  )
  return sums, stats


def target_logprobs(
  model: Decoder, batch: Batch, cfg: StepConfig, rules: Pass, key: jax.Array | None = None
) -> tuple[jax.Array, StackStats]:
  """Log-probability of each target, float32 [batch, seq], differentiable; masked ones included.

  Arguments as of `loss_sums`; of `cfg` loss_chunk_tokens. The statistics come with them.
  """
  x_BTD, stats = _read(model, batch, rules, key)
  how = cfg.loss_chunk_tokens, model.num.kernels, model.cfg.logit_soft_cap
  logprobs_BT = token_logprobs(x_BTD, model.head_weights(), batch["targets"], *how)
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
