"""What a training step minimises."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.stats import StackStats
from ats_jax.ops.cross_entropy import LossSums
from ats_jax.step.balance import Totals, routing_loss
from ats_jax.step.loss import loss_sums


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

  Attributes:
    fields: of a batch, beyond `data.batch.FIELDS`.
    names: of metrics beyond those of every step, behind which they are reported.
  """

  fields: ClassVar[Mapping[str, Field]]
  names: ClassVar[tuple[str, ...]]

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
  fields: ClassVar[Mapping[str, Field]] = {}
  names: ClassVar[tuple[str, ...]] = ()

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
