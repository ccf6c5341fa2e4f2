"""Pretraining on a mixture: the loss and the tokens of each source beside those of all."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import SOURCE, SOURCE_FIELD, Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.ops.cross_entropy import LossSums
from ats_jax.step.objective import (
  Contribution,
  Objective,
  Pretraining,
  Totals,
  loss_sums,
  routing_loss,
)


class Sums(NamedTuple):
  """Of tokens in the loss.

  Attributes:
    of_all: sums of all sources together.
    cross_entropy_S: [sources] float32, in nats.
    counted_S: [sources] float32, tokens.
  """

  of_all: LossSums
  cross_entropy_S: jax.Array
  counted_S: jax.Array


@dataclasses.dataclass(frozen=True)
class BySource:
  """`Pretraining`, which also reports `train/NAME/loss` and `train/NAME/tokens`; see `Objective`.

  Attributes:
    cfg: the resolved config, with `data.sources`.
  """

  cfg: Config

  @property
  def fields(self) -> Mapping[str, Field]:
    """See `Objective`."""
    return {SOURCE: SOURCE_FIELD}

  def __call__(
    self, model: Decoder, batch: Batch, whole: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    """See `Objective`; `sums` are `Sums`."""
    of_all, stats = loss_sums(model, batch, self.cfg.step, rules, key, per_token=True)
    each_BT = of_all.cross_entropy
    number_S = jnp.arange(len(self.cfg.data.sources))
    is_of_BTS = batch[SOURCE][..., None] == number_S
    sums = Sums(
      of_all._replace(cross_entropy=jnp.sum(each_BT)),
      jnp.sum(jnp.where(is_of_BTS, each_BT[..., None], 0.0), axis=(0, 1)),
      jnp.sum(jnp.where(is_of_BTS, batch["loss_mask"][..., None], 0.0), axis=(0, 1)),
    )
    loss = of_all.objective / whole.counted + routing_loss(self.cfg, model, stats, whole)
    return Contribution(loss, sums, stats)

  def means(self, sums: Sums, whole: Totals) -> dict[str, jax.Array]:
    """See `Objective`; the loss of a source without a token in the batch is not a number."""
    loss_S = sums.cross_entropy_S / sums.counted_S
    metrics = Pretraining(self.cfg).means(sums.of_all, whole)
    names = self.cfg.data.sources
    for name, loss, counted in zip(names, loss_S, sums.counted_S, strict=True):
      metrics |= {f"train/{name}/loss": loss, f"train/{name}/tokens": counted}
    return metrics


def objective_of(cfg: Config) -> Objective:
  """What a run on its text, or on its mixture of sources, minimises."""
  return BySource(cfg) if cfg.data.sources else Pretraining(cfg)


def of_sources(
  passes: Mapping[str, float | None], metrics: Mapping[str, float]
) -> dict[str, float | None]:
  """Further metrics of sources; for the host, when a row is written.

  Args:
    passes: how often each source has been read; None = that is not known.
    metrics: `StepMetrics.values` by name.

  Returns:
    `train/NAME/epochs`; and `train/NAME/loss` as None, where there is none.
  """
  absent = [name for name in passes if not metrics[f"train/{name}/tokens"]]
  epochs = {f"train/{name}/epochs": value for name, value in passes.items()}
  return epochs | {f"train/{name}/loss": None for name in absent}
