"""Losses of pairs beside float64 formulas on answers that stand alone, and their gradients."""

import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, assert_trees_close, make_decoder, micro_batches

from ats_jax.config.schema.loss import DpoConfig, OrpoConfig, RewardConfig, SimPoConfig
from ats_jax.model.decoder import with_head
from ats_jax.model.param import trainable
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import batch_totals, make_eval_step
from ats_jax.step.preference import Dpo, Orpo, SimPo
from ats_jax.step.reward import Reward

LOSSES = {
  "dpo": (Dpo, DpoConfig(beta=0.3)),
  "dpo, smoothed": (Dpo, DpoConfig(beta=0.3, label_smoothing=0.2)),
  "dpo, a token": (Dpo, DpoConfig(beta=0.3, form="sigmoid_norm")),
  "ipo": (Dpo, DpoConfig(beta=0.3, form="ipo")),
  "orpo": (Orpo, OrpoConfig(odds_weight=0.4)),
  "simpo": (SimPo, SimPoConfig(beta=2.0, margin=0.5)),
  "reward": (Reward, RewardConfig()),
}
# Per row of pairs: the lengths of (prompt, chosen, rejected); the rows need not be full.
PAIRS = [[(3, 5, 2), (1, 1, 9)], [(4, 2, 2)], [(2, 6, 7), (5, 3, 1)], [(1, 1, 1), (2, 8, 3)]]
SEQ = 40


def config(settings):
  changes = {"data.format": "preference", "data.max_segments": 6, "data.seq_len": SEQ}
  return canonical.config("dense", changes | {"step.loss": settings, "data.batch_size": 4})


def answers(vocab_size):
  """Of each pair both segments: (tokens, targets, mask), a row's pairs in one list."""
  rng = np.random.default_rng(0)
  some = lambda count: rng.integers(3, vocab_size, count)
  rows = []
  for pairs in PAIRS:
    rows.append([])
    for prompt, *lengths in pairs:
      asked = some(prompt)
      for length in lengths:
        ids = np.concatenate([asked, some(length)])
        tokens, mask = np.concatenate([[1], ids[:-1]]), np.arange(len(ids)) >= prompt
        rows[-1].append((tokens, ids, mask.astype(np.float32)))
  return rows


def packed(rows, reference):
  batch = {name: np.zeros((len(rows), SEQ), np.int32) for name in ("tokens", "targets")}
  batch |= {name: np.zeros((len(rows), SEQ), np.int32) for name in ("segment_ids", "positions")}
  batch |= {name: np.zeros((len(rows), SEQ), np.float32) for name in ("loss_mask", "reference")}
  values = iter(reference)
  for row, segments in enumerate(rows):
    at = 0
    for number, (tokens, targets, mask) in enumerate(segments, 1):
      here = row, slice(at, at + len(tokens))
      batch["tokens"][here], batch["targets"][here] = tokens, targets
      batch["segment_ids"][here], batch["loss_mask"][here] = number, mask
      batch["positions"][here] = np.arange(len(tokens))
      batch["reference"][row, at] = next(values)
      at += len(tokens)
  return batch


def alone(model, segments):
  """Log-probability and length of each answer, read without any neighbour.

  Of a model that rates: what it makes of the last token.
  """
  rows = {name: np.zeros((len(segments), SEQ), np.int32) for name in ("tokens", "targets", "ids")}
  mask = np.zeros((len(segments), SEQ), np.float32)
  for row, (tokens, targets, weights) in enumerate(segments):
    rows["tokens"][row, : len(tokens)], rows["targets"][row, : len(tokens)] = tokens, targets
    rows["ids"][row, : len(tokens)], mask[row, : len(tokens)] = 1, weights
  positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), mask.shape)
  x_BTD, _ = model(
    rows["tokens"], positions_BT=positions, segment_ids_BT=rows["ids"], rules=TRAINING, key=None
  )
  if not model.predicts:
    is_last_BT = jax.nn.one_hot([len(tokens) - 1 for tokens, *_ in segments], SEQ)
    rated_BT = jnp.sum(x_BTD * jax.sharding.reshard(model.head_weights()[0], jax.P()), axis=-1)
    return jnp.sum(rated_BT * is_last_BT, axis=-1), mask.sum(axis=-1)
  logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, model.head_weights())
  chosen_BTV = jax.nn.one_hot(rows["targets"], logits_BTV.shape[-1])
  logprobs_BT = jnp.sum(jax.nn.log_softmax(logits_BTV, axis=-1) * chosen_BTV, axis=-1)
  return jnp.sum(logprobs_BT * mask, axis=-1), mask.sum(axis=-1)


def formula(loss, logprobs, lengths, reference):
  """Of the papers, written out for [pairs, 2] numbers."""
  if isinstance(loss, RewardConfig):
    return jnp.log1p(jnp.exp(logprobs[:, 1] - logprobs[:, 0]))
  if isinstance(loss, DpoConfig):
    ratios = logprobs - reference
    if loss.form != "sigmoid":
      ratios = ratios / lengths
    gap = ratios[:, 0] - ratios[:, 1]
    if loss.form == "ipo":
      return (gap - 1 / (2 * loss.beta)) ** 2
    right, wrong = (jnp.log1p(jnp.exp(-sign * loss.beta * gap)) for sign in (1, -1))
    return (1 - loss.label_smoothing) * right + loss.label_smoothing * wrong
  mean = logprobs / lengths
  if isinstance(loss, SimPoConfig):
    return jnp.log1p(jnp.exp(loss.margin - loss.beta * (mean[:, 0] - mean[:, 1])))
  odds = mean - jnp.log1p(-jnp.exp(mean))
  return -mean[:, 0] + loss.odds_weight * jnp.log1p(jnp.exp(odds[:, 1] - odds[:, 0]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_answers_that_stand_alone(name, mesh):
  objective_of, loss = LOSSES[name]
  cfg = config(loss)
  objective, model = objective_of(cfg), make_decoder(cfg)
  model = with_head(cfg, model.num, model, jax.random.key(1))
  rows = answers(cfg.model.vocab_size)
  segments = [segment for row in rows for segment in row]
  reference = np.random.default_rng(1).normal(-20, 2, len(segments)).astype(np.float32)

  def dense(model):
    logprobs, lengths = alone(model, segments)
    pairs = lambda x: x.reshape(-1, 2)
    losses = formula(loss, pairs(logprobs), pairs(lengths), pairs(reference))
    return jnp.mean(losses)

  want, gradients = jax.jit(jax.value_and_grad(dense))(model)
  batch = packed(rows, reference)
  micro = micro_batches(batch, 2)

  @jax.jit
  def made(model, micro):
    totals, key = batch_totals(micro, TRAINING, objective), jax.random.key(0)
    sums, _, grads = sums_and_grads(objective, model, micro, totals, key, TRAINING)
    return objective.means(sums, totals), totals, grads

  means, totals, grads = made(model, micro)
  assert totals.items == sum(map(len, PAIRS))
  np.testing.assert_allclose(means["train/loss"], want, rtol=1e-5)
  assert_trees_close(grads, trainable(gradients), rtol=1e-4, atol=2e-6)
  scoring = dataclasses.replace(TRAINING, training=False)
  sums = make_eval_step(cfg, objective=objective)(model, batch, scoring)
  np.testing.assert_allclose(sums[0] / sums[2], want, rtol=1e-5)
  np.testing.assert_allclose(sums[1] / sums[2], means["train/accuracy"])


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_padding_has_no_pair(name, mesh):
  objective_of, loss = LOSSES[name]
  cfg = config(loss)
  objective, model = objective_of(cfg), make_decoder(cfg)
  batch = packed([[], *answers(cfg.model.vocab_size)[:1], [], []], np.zeros(4))

  def contribution(model, batch):
    totals = batch_totals(batch, TRAINING, objective)
    return objective(model, batch, totals, TRAINING, None).loss

  loss, grads = jax.jit(jax.value_and_grad(contribution))(model, batch)
  assert np.isfinite(loss)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainable(grads)))
