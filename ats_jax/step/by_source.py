"""Pretraining on a mixture of sources: also reports the loss and the tokens of each source."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import SOURCE, SOURCE_FIELD, Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.ops.cross_entropy import LossSums
from ats_jax.step.objective import (
  Contribution,
  Objective,
  Pretraining,
  Totals,
  loss_sums,
  routing_loss,
)


class SourceSums(NamedTuple):
  """Sums over the tokens in the loss.

  Attributes:
    of_all: the sums over all sources together.
    cross_entropy_S: [sources] float32, cross-entropy of each source in nats.
    counted_S: [sources] float32, tokens of each source.
  """

  of_all: LossSums
  cross_entropy_S: jax.Array
  counted_S: jax.Array


@dataclasses.dataclass(frozen=True)
class BySource(Objective):
  """`Pretraining` that also reports `train/NAME/loss` and `train/NAME/tokens` of each source.

  Attributes:
    cfg: the resolved config, with `data.sources`.
  """

  cfg: Config

  @property
  @override
  def fields(self) -> Mapping[str, Field]:
    return {SOURCE: SOURCE_FIELD}

  @override
  def __call__(
    self, model: Decoder, batch: Batch, totals: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    of_all, stats = loss_sums(model, batch, self.cfg.step, rules, key, per_token=True)
    each_BT = of_all.cross_entropy
    number_S = jnp.arange(len(self.cfg.data.sources))
    is_of_BTS = batch[SOURCE][..., None] == number_S
    sums = SourceSums(
      of_all._replace(cross_entropy=jnp.sum(each_BT)),
      jnp.sum(jnp.where(is_of_BTS, each_BT[..., None], 0.0), axis=(0, 1)),
      jnp.sum(jnp.where(is_of_BTS, batch["loss_mask"][..., None], 0.0), axis=(0, 1)),
    )
    loss = of_all.objective / totals.counted + routing_loss(self.cfg, model, stats, totals)
    return Contribution(loss, sums, stats)

  @override
  def means(self, sums: SourceSums, totals: Totals) -> dict[str, jax.Array]:
    # The loss of a source without a token in the batch is NaN.
    loss_S = sums.cross_entropy_S / sums.counted_S
    metrics = Pretraining(self.cfg).means(sums.of_all, totals)
    names = self.cfg.data.sources
    for name, loss, counted in zip(names, loss_S, sums.counted_S, strict=True):
      metrics |= {f"train/{name}/loss": loss, f"train/{name}/tokens": counted}
    return metrics


def pretraining_objective(cfg: Config) -> Objective:
  """The pretraining objective of a run: by source if it has a mixture of sources."""
  return BySource(cfg) if cfg.data.sources else Pretraining(cfg)


def source_metrics(
  passes: Mapping[str, float | None], metrics: Mapping[str, float]
) -> dict[str, float | None]:
  """Compute further metrics of sources on the host, for a row of the log.

  Args:
    passes: how many epochs of each source have been read; None = not known.
    metrics: `StepMetrics.values` by name.

  Returns:
    `train/NAME/epochs`, and `train/NAME/loss` as None for sources without a token in the batch.
  """
  absent = [name for name in passes if not metrics[f"train/{name}/tokens"]]
  epochs = {f"train/{name}/epochs": value for name, value in passes.items()}
  return epochs | {f"train/{name}/loss": None for name in absent}
