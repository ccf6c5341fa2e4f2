"""KTO beside its formula in float64, on answers whose log-probabilities are known."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, tiny_config

from ats_jax.config.schema.loss import KtoConfig
from ats_jax.step.labelled import Kto
from ats_jax.step.objective import batch_totals
from ats_jax.step.preference import Answers

LOSS = KtoConfig(beta=0.3, desirable=1.5, undesirable=0.7)
MOST, SEQ = 3, 24
NUMBERS = [3, 1, 0, 2]  # of documents in each row; a row is empty


def made(rng):
  """A batch of these rows, and of each document: log-ratios of both answers, and the label."""
  shape = (len(NUMBERS), SEQ)
  batch = {name: np.zeros(shape, np.int32) for name in ("segment_ids", "positions")}
  batch |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "reference", "label")}
  logprobs, lengths = (np.zeros((2, len(NUMBERS), MOST), np.float32) for _ in range(2))
  ratios, labels = [], []
  for row, number in enumerate(NUMBERS):
    for pair in range(number):
      labels.append(rng.choice([-1, 1]))
      of_model, of_reference = rng.normal(-9, 2, 2), rng.normal(-9, 2, 2)
      ratios.append(of_model - of_reference)
      logprobs[:, row, pair], lengths[:, row, pair] = of_model, rng.integers(1, 4, 2)
      for which in range(2):
        at = 8 * pair + 4 * which
        batch["segment_ids"][row, at : at + 4] = 2 * pair + which + 1
        batch["positions"][row, at : at + 4] = np.arange(4)
        batch["reference"][row, at], batch["label"][row, at] = of_reference[which], labels[-1]
  return batch, Answers(*map(jnp.asarray, logprobs)), Answers(*lengths), np.array(ratios), labels


@pytest.mark.parametrize("seed", range(4))  # the estimate is above 0 in some of them
def test_it_is_that_of_the_paper(seed):
  cfg = tiny_config({
    "data.format": "labelled", "data.max_segments": 2 * MOST, "step.loss": LOSS
  })  # fmt: skip
  objective = Kto(cfg)
  batch, logprobs, lengths, ratios, labels = made(np.random.default_rng(seed))
  sums, totals = (
    objective.summed(logprobs, lengths, batch),
    batch_totals(batch, TRAINING, objective),
  )
  assert totals.items == sum(NUMBERS)

  divergence = max(0.0, ratios[:, 1].mean())
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  of_good = LOSS.desirable * (1 - sigmoid(LOSS.beta * (ratios[:, 0] - divergence)))
  of_bad = LOSS.undesirable * (1 - sigmoid(LOSS.beta * (divergence - ratios[:, 0])))
  is_good = np.array(labels) > 0
  rating = lambda chosen: LOSS.beta * ratios[chosen, 0].mean() if chosen.any() else 0.0
  want = {
    "train/loss": np.where(is_good, of_good, of_bad).mean(),
    "train/accuracy": ((ratios[:, 0] > divergence) == is_good).mean(),
    "preference/chosen": rating(is_good),
    "preference/rejected": rating(~is_good),
    "preference/margin": rating(is_good) - rating(~is_good),
    "preference/divergence": divergence,
  }
  got = objective.means(sums, totals)
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
