"""Losses of pairs of answers in one row: DPO and IPO, ORPO, SimPO.

Letters: B batch, T seq, P pairs of a row at most.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config, StepConfig
from ats_jax.config.schema.loss import DpoConfig, OrpoConfig, SimPoConfig
from ats_jax.data.batch import Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.stats import StackStats
from ats_jax.step.objective import (
  Contribution,
  Objective,
  Totals,
  routing_loss,
  target_logprobs,
)

REFERENCE = "reference"  # a field of rows
REFERENCE_FIELD = Field(
  np.float32, "log-probability of a segment's answer by the reference, at its first position"
)


class Answers(NamedTuple):
  """Of each pair a number of the preferred answer and one of the other; [batch, pairs] float32."""

  chosen: jax.Array
  rejected: jax.Array

  @property
  def gap(self) -> jax.Array:
    """By how much the preferred one is larger."""
    return self.chosen - self.rejected

  def per(self, other: "Answers") -> "Answers":
    """Divide by `other`, where that is 0 by 1."""
    return Answers(*(a / jnp.where(b > 0, b, 1.0) for a, b in zip(self, other, strict=True)))


class PairSums(NamedTuple):
  """Sums over pairs, float32 scalars.

  Attributes:
    loss: the loss.
    won: pairs whose preferred answer is rated higher.
    chosen: ratings of the preferred answers.
    rejected: ratings of the others.
    margin: by how much those of the preferred ones are higher.
  """

  loss: jax.Array
  won: jax.Array
  chosen: jax.Array
  rejected: jax.Array
  margin: jax.Array


def sums_of_answers(values_BT: jax.Array, segment_ids_BT: jax.Array, most: int) -> Answers:
  """Sum over the positions of each answer.

  Args:
    values_BT: float32, 0 where a position is not to count.
    segment_ids_BT: those of pair p (from 0) are 2 p + 1 and 2 p + 2.
    most: P, pairs of a row at most.
  """
  number_P = jnp.arange(most)

  def of_segments(first: int) -> jax.Array:
    is_of_BTP = segment_ids_BT[..., None] == 2 * number_P + first
    return jnp.sum(jnp.where(is_of_BTP, values_BT[..., None], 0.0), axis=1)

  return Answers(of_segments(1), of_segments(2))


@dataclasses.dataclass(frozen=True)
class Pairs(Objective):
  """What losses of two answers to each question share: rows of pairs, and a mean over them.

  Attributes:
    cfg: the resolved config.
  """

  ITEMS: ClassVar[str] = "pairs"

  cfg: Config

  @property
  @override
  def fields(self) -> Mapping[str, Field]:
    return {}

  @override
  def items(self, batch: Batch) -> jax.Array:
    ids = batch["segment_ids"]
    is_second = (batch["positions"] == 0) & (ids > 0) & (ids % 2 == 0)
    return jnp.sum(is_second, dtype=jnp.float32)

  @abc.abstractmethod
  def summed(self, logprobs: Answers, lengths: Answers, batch: Batch) -> Any:
    """Sum over pairs.

    Args:
      logprobs: what `readings` says.
      lengths: sums of the weights of an answer's tokens.
      batch: one micro-batch.

    Returns:
      A tuple of float32 scalars with the fields `loss`, and `won`: pairs that are rated right.
    """

  def readings(
    self, model: Decoder, batch: Batch, step: StepConfig, rules: Pass, key: jax.Array | None
  ) -> tuple[Answers, StackStats]:
    """What the model says of each answer: here the log-probability, by the weights of tokens."""
    logprobs_BT, stats = target_logprobs(model, batch, step, rules, key)
    mask = batch["loss_mask"]
    return self.of_answers(jnp.where(mask > 0, logprobs_BT * mask, 0.0), batch), stats

  def of_answers(self, values_BT: jax.Array, batch: Batch) -> Answers:
    """`sums_of_answers` of a batch."""
    return sums_of_answers(values_BT, batch["segment_ids"], self.cfg.data.max_segments // 2)

  def _sums(
    self, model: Decoder, batch: Batch, step: StepConfig, rules: Pass, key: jax.Array | None
  ) -> tuple[Any, StackStats]:
    readings, stats = self.readings(model, batch, step, rules, key)
    return self.summed(readings, self.of_answers(batch["loss_mask"], batch), batch), stats

  @override
  def __call__(
    self, model: Decoder, batch: Batch, totals: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    sums, stats = self._sums(model, batch, self.cfg.step, rules, key)
    loss = sums.loss / totals.items + routing_loss(self.cfg, model, stats, totals)
    return Contribution(loss, sums, stats)

  @override
  def score(
    self, model: Decoder, batch: Batch, step: StepConfig, rules: Pass
  ) -> tuple[tuple[jax.Array, ...], StackStats]:
    sums, stats = self._sums(model, batch, step, rules, None)
    further = (getattr(sums, name) for name in self.SCORES)
    return (sums.loss, sums.won, self.items(batch), *further), stats


class Preference(Pairs):
  """What losses share that compare the two answers."""

  SCORES: ClassVar[tuple[str, ...]] = ("margin",)

  @abc.abstractmethod
  def of_pairs(
    self, logprobs: Answers, lengths: Answers, batch: Batch
  ) -> tuple[jax.Array, Answers]:
    """Compute the losses of pairs, and the rating of each answer.

    Args:
      logprobs: what `readings` says.
      lengths: sums of the weights of an answer's tokens.
      batch: one micro-batch.

    Returns:
      [batch, pairs] float32 losses, of which those of pairs that there are count; the ratings.
    """

  @override
  def summed(self, logprobs: Answers, lengths: Answers, batch: Batch) -> PairSums:
    losses, ratings = self.of_pairs(logprobs, lengths, batch)
    total = lambda x: jnp.sum(jnp.where(lengths.rejected > 0, x, 0.0))
    chosen, rejected = total(ratings.chosen), total(ratings.rejected)
    return PairSums(total(losses), total(ratings.gap > 0), chosen, rejected, chosen - rejected)

  @override
  def means(self, sums: PairSums, totals: Totals) -> dict[str, jax.Array]:
    of_pair = lambda x: x / totals.items
    return {
      "train/loss": of_pair(sums.loss),
      "train/accuracy": of_pair(sums.won),
      "preference/chosen": of_pair(sums.chosen),
      "preference/rejected": of_pair(sums.rejected),
      "preference/margin": of_pair(sums.margin),
    }


class Dpo(Preference):
  """The objective of `step.loss=dpo`; a rating is beta times the log-ratio to the reference."""

  @property
  @override
  def fields(self) -> Mapping[str, Field]:
    return {REFERENCE: REFERENCE_FIELD}

  @override
  def of_pairs(
    self, logprobs: Answers, lengths: Answers, batch: Batch
  ) -> tuple[jax.Array, Answers]:
    cfg = self.cfg.step.loss
    assert isinstance(cfg, DpoConfig)
    reference = self.of_answers(batch[REFERENCE], batch)
    ratios = Answers(*(a - b for a, b in zip(logprobs, reference, strict=True)))
    if cfg.form != "sigmoid":
      ratios = ratios.per(lengths)
    ratings = Answers(*(cfg.beta * ratio for ratio in ratios))
    if cfg.form == "ipo":
      return (ratios.gap - 1 / (2 * cfg.beta)) ** 2, ratings
    smooth, log_sigmoid = cfg.label_smoothing, jax.nn.log_sigmoid
    losses = -(1 - smooth) * log_sigmoid(ratings.gap) - smooth * log_sigmoid(-ratings.gap)
    return losses, ratings


class Orpo(Preference):
  """The objective of `step.loss=orpo`; a rating is the weighted log-probability a token."""

  @override
  def of_pairs(
    self, logprobs: Answers, lengths: Answers, batch: Batch
  ) -> tuple[jax.Array, Answers]:
    del batch
    cfg = self.cfg.step.loss
    assert isinstance(cfg, OrpoConfig)
    each = logprobs.per(lengths)
    # log(1 - p); an absent answer has p = 1, whose loss does not count but must be finite.
    log_rest = Answers(*(_log1mexp(jnp.minimum(x, -1e-6)) for x in each))
    odds = jax.nn.log_sigmoid(each.gap - log_rest.gap)
    ratings = Answers(*(cfg.odds_weight * x for x in each))
    return -each.chosen - cfg.odds_weight * odds, ratings


class SimPo(Preference):
  """The objective of `step.loss=simpo`; a rating is beta times the log-probability a token."""

  @override
  def of_pairs(
    self, logprobs: Answers, lengths: Answers, batch: Batch
  ) -> tuple[jax.Array, Answers]:
    del batch
    cfg = self.cfg.step.loss
    assert isinstance(cfg, SimPoConfig)
    ratings = Answers(*(cfg.beta * x for x in logprobs.per(lengths)))
    return -jax.nn.log_sigmoid(ratings.gap - cfg.margin), ratings


def _log1mexp(x: jax.Array) -> jax.Array:
  """log(1 - exp(x)) of x < 0 (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
  return jnp.where(x > -0.6931472, jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))
