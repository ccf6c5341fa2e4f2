"""Distillation beside plain float64 math on all logits, and its gradients."""

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, assert_trees_close, make_decoder, micro_batches, random_rows

from ats_jax.config.schema.loss import DistillConfig
from ats_jax.model.param import trainable
from ats_jax.ops.likeliest import likeliest
from ats_jax.step.core import sums_and_grads
from ats_jax.step.distill import IDS, LOGPROBS, Distill, divergence
from ats_jax.step.objective import batch_totals

TEMPERATURE, LABELS, SMALLEST = 2.0, 0.3, 1e-7


def plain(teacher, student, kind):
  """Of [..., V] probabilities in float64."""
  kl = lambda p, q: np.sum(p * np.log(p / q), axis=-1)
  mixed = (teacher + student) / 2
  both = (kl(teacher, mixed) + kl(student, mixed)) / 2
  return {"forward": kl(teacher, student), "reverse": kl(student, teacher), "jsd": both}[kind]


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_the_rest_counts_as_one_token(kind, mesh):
  rng, k, size = np.random.default_rng(0), 3, 9
  teacher, student = rng.dirichlet(np.ones(size), (2, 2, 4))  # [2, 4, size]
  joined = lambda p: np.concatenate([p[..., :k], p[..., k:].sum(-1, keepdims=True)], axis=-1)
  field = lambda p: jnp.asarray(np.log(p[..., :k]).reshape(2, -1), jnp.float32)
  got = divergence(field(teacher), field(student), k, kind)
  np.testing.assert_allclose(got, plain(joined(teacher), joined(student), kind), rtol=1e-4)


@pytest.mark.parametrize(("model", "kind"), [("dense", "forward"), ("window", "jsd")])
def test_loss_and_gradients_are_those_of_all_logits(model, kind, mesh):
  """With all tokens in the top k it is the divergence itself."""
  size = canonical.config(model).model.vocab_size
  loss = DistillConfig(
    teacher="t", top_k=size, temperature=TEMPERATURE, labels=LABELS, divergence=kind
  )
  cfg = canonical.config(model, {"step.loss": loss, "step.accum_steps": 2})
  objective, student, teacher = Distill(cfg), make_decoder(cfg), make_decoder(cfg, seed=1)
  rows = random_rows(cfg, cfg.data.batch_size)

  def logits(model):
    x_BTD, _ = model(
      rows["tokens"], positions_BT=rows["positions"], segment_ids_BT=rows["segment_ids"],
      rules=TRAINING, key=None,
    )  # fmt: skip
    return x_BTD, model.logits(x_BTD)

  @jax.jit
  def expected(teacher):
    x_BTD, _ = logits(teacher)
    how = size, TEMPERATURE, cfg.step.loss_chunk_tokens, cfg.model.logit_soft_cap
    return likeliest(x_BTD, teacher.head_weights(), *how)

  ids, logprobs = map(np.asarray, expected(teacher))
  micro = micro_batches(rows | {IDS: ids, LOGPROBS: logprobs}, 2)

  @jax.jit
  def made(model, micro):
    totals, key = batch_totals(micro, TRAINING, objective), jax.random.key(0)
    sums, _, grads = sums_and_grads(objective, model, micro, totals, key, TRAINING)
    return objective.means(sums, totals), grads

  means, grads = made(student, micro)
  softmax = lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  theirs, ours = (
    softmax(np.asarray(jax.jit(logits)(m)[1], np.float64) / TEMPERATURE) for m in (teacher, student)
  )
  mask = rows["loss_mask"]
  want = (plain(theirs, ours, kind) * mask).sum() / mask.sum()
  np.testing.assert_allclose(means["train/divergence"], want, rtol=1e-3)

  def dense(model):
    _, logits_BTV = logits(model)
    logp = jax.nn.log_softmax(logits_BTV)
    hot = jax.nn.one_hot(rows["targets"], size)
    text = -jnp.sum(logp * hot, axis=-1)
    p, q = jnp.log(jnp.asarray(theirs, jnp.float32)), jax.nn.log_softmax(logits_BTV / TEMPERATURE)
    kl = lambda p, q: jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    mixed = jnp.logaddexp(p, q) - jnp.log(2.0)
    apart = kl(p, q) if kind == "forward" else (kl(p, mixed) + kl(q, mixed)) / 2
    both = LABELS * text + (1 - LABELS) * TEMPERATURE**2 * apart
    return jnp.sum(both * mask) / mask.sum()

  wanted = jax.jit(jax.grad(dense))(student)
  assert_trees_close(grads, trainable(wanted), rtol=2e-3, atol=2e-5)
