"""The loss of a student: what a larger model expects next, beside the text itself.

Letters: B batch, T seq, K tokens at a position, R these and all others as one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.config.schema.loss import DistillConfig
from ats_jax.data.batch import Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.ops.likeliest import logprobs_of
from ats_jax.step.objective import (
  Contribution,
  Objective,
  Totals,
  final_activations,
  routing_loss,
  sums_at_head,
)

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"  # fields of rows
_LEAST = 1e-7  # a probability


@dataclasses.dataclass(frozen=True)
class Distill(Objective):
  """The objective of `step.loss=distill`; held-out rows are scored by their text alone.

  Attributes:
    cfg: the resolved config.
  """

  cfg: Config

  @property
  def _loss(self) -> DistillConfig:
    assert isinstance(self.cfg.step.loss, DistillConfig)
    return self.cfg.step.loss

  @property
  @override
  def fields(self) -> Mapping[str, Field]:
    k = self._loss.top_k
    return {
      IDS: Field(np.int32, "the teacher's likeliest next tokens", k),
      LOGPROBS: Field(np.float32, "their log-probabilities", k),
    }

  @override
  def __call__(
    self, model: Decoder, batch: Batch, totals: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    loss, cfg = self._loss, self.cfg
    x_BTD, stats = final_activations(model, batch, rules, key)
    sums = sums_at_head(model, x_BTD, batch, cfg.step)
    how = loss.temperature, cfg.step.loss_chunk_tokens, model.cfg.logit_soft_cap
    ours = logprobs_of(x_BTD, model.head_weights(), batch[IDS], *how)
    apart_BT = divergence(batch[LOGPROBS], ours, loss.top_k, loss.divergence)
    mask_BT = batch["loss_mask"]
    apart = jnp.sum(jnp.where(mask_BT > 0, apart_BT * mask_BT, 0.0))
    # Gradients of softened probabilities shrink with the square (arXiv:1503.02531, section 2).
    taught = loss.temperature**2 * apart
    both = loss.labels * sums.objective + (1 - loss.labels) * taught
    total = both / totals.counted + routing_loss(cfg, model, stats, totals)
    return Contribution(total, (sums, apart), stats)

  @override
  def means(self, sums: Any, totals: Totals) -> dict[str, jax.Array]:
    of_text, apart = sums
    return {
      "train/loss": of_text.cross_entropy / totals.counted,
      "train/accuracy": of_text.correct / totals.counted,
      "train/divergence": apart / totals.counted,
    }


def divergence(teacher_BTK: jax.Array, student_BTK: jax.Array, k: int, kind: str) -> jax.Array:
  """How far two distributions over some tokens and the rest are apart, [batch, seq].

  Args:
    teacher_BTK: log-probabilities, [batch, seq * K].
    student_BTK: those of the same tokens.
    k: K.
    kind: 'forward', 'reverse' or 'jsd'.
  """
  teacher, student = (_with_rest(a, k) for a in (teacher_BTK, student_BTK))
  kl = lambda p, q: jnp.sum(jnp.exp(p) * (p - q), axis=-1)
  if kind == "forward":
    return kl(teacher, student)
  if kind == "reverse":
    return kl(student, teacher)
  mixed = jnp.logaddexp(teacher, student) - jnp.log(2.0)
  return (kl(teacher, mixed) + kl(student, mixed)) / 2


def _with_rest(logprobs_BTK: jax.Array, k: int) -> jax.Array:
  """Log-probabilities [batch, seq, K + 1], the last of all other tokens together."""
  shape = (logprobs_BTK.shape[0], logprobs_BTK.shape[1] // k, k)
  sharding = jax.typeof(logprobs_BTK).sharding.spec
  each = jax.lax.reshape(logprobs_BTK, shape, out_sharding=jax.P(*sharding, None))
  rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(each), axis=-1, keepdims=True), _LEAST)
  return jnp.concatenate([each, jnp.log(rest)], axis=-1)
