"""The loss of a model that rates answers (Bradley-Terry).

Letters: B batch, T seq, P pairs of a row at most.
"""

from typing import override

import jax
import jax.numpy as jnp

from ats_jax.config.schema import StepConfig
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.rating import ratings
from ats_jax.model.stats import StackStats
from ats_jax.sharding.apply import reshard, row_axis
from ats_jax.step.objective import final_activations
from ats_jax.step.preference import Answers, Preference


class Reward(Preference):
  """The objective of `step.loss=reward`: an answer is rated where its conversation ends."""

  @override
  def readings(
    self, model: Decoder, batch: Batch, step: StepConfig, rules: Pass, key: jax.Array | None
  ) -> tuple[Answers, StackStats]:
    x_BTD, stats = final_activations(model, batch, rules, key)
    # A segment ends where another one, or padding, begins behind it.
    ids = batch["segment_ids"]
    rows = row_axis(ids.shape[0])
    whole = reshard(ids, rows, None)
    behind = reshard(jnp.pad(whole[:, 1:], ((0, 0), (0, 1))), rows, "seq")
    rated_BT = jnp.where(ids != behind, ratings(model, x_BTD), 0.0)
    return self.of_answers(rated_BT, batch), stats

  @override
  def of_pairs(
    self, logprobs: Answers, lengths: Answers, batch: Batch
  ) -> tuple[jax.Array, Answers]:
    del lengths, batch
    return -jax.nn.log_sigmoid(logprobs.gap), logprobs
