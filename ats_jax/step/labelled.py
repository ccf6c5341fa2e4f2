"""The loss of answers that are desirable or not: KTO."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema.loss import KtoConfig
from ats_jax.data.batch import Batch, Field
from ats_jax.step.objective import Totals
from ats_jax.step.preference import REFERENCE, REFERENCE_FIELD, Answers, Pairs

LABEL = "label"  # a field of rows


class LabelledSums(NamedTuple):
  """Sums over answers, float32 scalars.

  Attributes:
    loss: the loss.
    won: answers that are rated on the side of their label.
    desirable: the number of these.
    chosen: ratings of the desirable answers.
    rejected: ratings of the others.
    divergence: the estimate of each micro-batch, as often as it has answers.
  """

  loss: jax.Array
  won: jax.Array
  desirable: jax.Array
  chosen: jax.Array
  rejected: jax.Array
  divergence: jax.Array


class Kto(Pairs):
  """The objective of `step.loss=kto`; a rating is beta times the log-ratio to the reference.

  The first answer of a pair has the label. The second one, to another question, tells how far the
  model is from the reference: the mean of its log-ratios over a micro-batch, through which no
  gradient goes.
  """

  ITEMS: ClassVar[str] = "answers"

  @property
  @override
  def fields(self) -> Mapping[str, Field]:
    meaning = "1 = a segment's answer is desirable, -1 = it is not; at its first position"
    return {REFERENCE: REFERENCE_FIELD, LABEL: Field(np.float32, meaning)}

  @override
  def summed(self, logprobs: Answers, lengths: Answers, batch: Batch) -> LabelledSums:
    cfg = self.cfg.step.loss
    assert isinstance(cfg, KtoConfig)
    reference = self.of_answers(batch[REFERENCE], batch)
    label = self.of_answers(batch[LABEL], batch).chosen
    is_pair = lengths.rejected > 0
    total = lambda x: jnp.sum(jnp.where(is_pair, x, 0.0))
    number = total(1.0)
    apart = total(logprobs.rejected - reference.rejected) / jnp.maximum(number, 1.0)
    divergence = jnp.maximum(jax.lax.stop_gradient(apart), 0.0)
    ratio = logprobs.chosen - reference.chosen
    gain = label * cfg.beta * (ratio - divergence)
    weight = jnp.where(label > 0, cfg.desirable, cfg.undesirable)
    return LabelledSums(
      loss=total(weight * jax.nn.sigmoid(-gain)),
      won=total(gain > 0),
      desirable=total(label > 0),
      chosen=cfg.beta * total(jnp.where(label > 0, ratio, 0.0)),
      rejected=cfg.beta * total(jnp.where(label < 0, ratio, 0.0)),
      divergence=divergence * number,
    )

  @override
  def means(self, sums: LabelledSums, totals: Totals) -> dict[str, jax.Array]:
    of = lambda x, number: x / jnp.maximum(number, 1.0)
    chosen = of(sums.chosen, sums.desirable)
    rejected = of(sums.rejected, totals.items - sums.desirable)
    return {
      "train/loss": sums.loss / totals.items,
      "train/accuracy": sums.won / totals.items,
      "preference/chosen": chosen,
      "preference/rejected": rejected,
      "preference/margin": chosen - rejected,
      "preference/divergence": sums.divergence / totals.items,
    }
