"""Other objectives than pre-training's take real steps; their gradients are those of dense math."""

import dataclasses
from typing import ClassVar

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, assert_trees_close, make_decoder, micro_batches, random_rows

from ats_jax.config.schema import Config
from ats_jax.data.batch import FIELDS, Field
from ats_jax.sharding.mesh import to_global
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Contribution, Pretraining, batch_totals, target_logprobs
from ats_jax.step.program import abstract_batch, make_program

CFG = canonical.config("dense", {"step.accum_steps": 2})
BETA, CLIP = 0.5, 0.1
# float32 sums in another order; gains of either sign cancel.
RTOL, ATOL = 1e-5, 1e-6


def logprobs_of_rows(logprobs_BT, batch):
  return jnp.sum(logprobs_BT * batch["loss_mask"], axis=-1)


def preference_losses(logprobs_BT, batch):
  """DPO (arXiv:2305.18290): rows 2i are preferred to rows 2i + 1."""
  more_B = logprobs_of_rows(logprobs_BT - batch["reference_logprobs"], batch)
  margins = BETA * (more_B[0::2] - more_B[1::2])
  return -jax.nn.log_sigmoid(margins), margins


@dataclasses.dataclass(frozen=True)
class Preference:
  cfg: Config
  fields: ClassVar = {"reference_logprobs": Field(np.float32, "of another model")}

  def __call__(self, model, batch, totals, rules, key):
    logprobs_BT, stats = target_logprobs(model, batch, self.cfg.step, rules, key)
    losses, margins = preference_losses(logprobs_BT, batch)
    pairs = totals.rows / 2
    sums = {"loss": jnp.sum(losses), "won": jnp.sum(margins > 0.0), "margin": jnp.sum(margins)}
    return Contribution(jnp.sum(losses) / pairs, sums, stats)

  def means(self, sums, totals):
    pairs = totals.rows / 2
    return {
      "train/loss": sums["loss"] / pairs,
      "train/accuracy": sums["won"] / pairs,
      "preference/margin": sums["margin"] / pairs,
    }


def surrogate(logprobs_BT, batch):
  """The clipped gain of PPO and GRPO (arXiv:1707.06347) a token."""
  ratio_BT = jnp.exp(logprobs_BT - batch["old_logprobs"])
  clipped_BT = jnp.clip(ratio_BT, 1.0 - CLIP, 1.0 + CLIP)
  return jnp.minimum(ratio_BT * batch["advantages"], clipped_BT * batch["advantages"])


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
  cfg: Config
  fields: ClassVar = {
    "old_logprobs": Field(np.float32, "of the model that wrote the text"),
    "advantages": Field(np.float32, "how good the text was"),
  }

  def __call__(self, model, batch, totals, rules, key):
    logprobs_BT, stats = target_logprobs(model, batch, self.cfg.step, rules, key)
    gain = jnp.sum(surrogate(logprobs_BT, batch) * batch["loss_mask"])
    return Contribution(-gain / totals.counted, gain, stats)

  def means(self, sums, totals):
    return {"train/loss": -sums / totals.counted}


def dense_logprobs(model, rows):
  """From the logits of all tokens at once, by jax's own softmax."""
  x_BTD, _ = model(
    rows["tokens"], positions_BT=rows["positions"], segment_ids_BT=rows["segment_ids"],
    rules=TRAINING, key=None,
  )  # fmt: skip
  logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, model.head_weights())
  logprobs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
  return jnp.sum(logprobs_BTV * jax.nn.one_hot(rows["targets"], CFG.model.vocab_size), axis=-1)


def dense_preference(model, rows):
  losses, _ = preference_losses(dense_logprobs(model, rows), rows)
  return jnp.mean(losses)


def dense_policy_gradient(model, rows):
  gain_BT = surrogate(dense_logprobs(model, rows), rows) * rows["loss_mask"]
  return -jnp.sum(gain_BT) / jnp.sum(rows["loss_mask"])


def rows_for(objective):
  rows, rng = random_rows(CFG, CFG.data.batch_size, seed=3), np.random.default_rng(0)
  shape = rows["tokens"].shape
  before = np.asarray(jax.jit(dense_logprobs)(make_decoder(CFG, seed=1), rows))
  extra = {
    "reference_logprobs": before,
    "old_logprobs": before + rng.normal(0.0, CLIP, shape).astype(np.float32),
    "advantages": rng.normal(size=shape).astype(np.float32),
  }
  return rows | {name: extra[name] for name in objective.fields}


CASES = [(Preference(CFG), dense_preference), (PolicyGradient(CFG), dense_policy_gradient)]


@pytest.mark.parametrize(("objective", "dense"), CASES, ids=lambda x: type(x).__name__)
@pytest.mark.thorough
def test_gradients_are_those_of_the_dense_objective(mesh, objective, dense):
  rows, model = rows_for(objective), canonical.model(CFG)
  batch = micro_batches(rows, 2)

  def accumulated(model):
    totals = batch_totals(batch, TRAINING)
    sums, _, grads = sums_and_grads(objective, model, batch, totals, jax.random.key(0), TRAINING)
    return objective.means(sums, totals)["train/loss"], grads

  loss, grads = jax.jit(accumulated)(model)
  want, want_grads = jax.jit(jax.value_and_grad(dense))(model, rows)
  np.testing.assert_allclose(loss, want, RTOL, ATOL)
  assert_trees_close(grads, want_grads, rtol=1e-4, atol=ATOL)


def test_real_steps_minimise_it(mesh):
  objective, dense = CASES[0]
  rows = rows_for(objective)
  program = make_program(CFG, objective)
  state = program.init()
  first = float(jax.jit(dense)(state.model, rows))
  rules = program.training_rules(1)
  step = program.compile_train_step(state, rules)  # knows the fields
  batch = to_global(micro_batches(rows, 2), mesh)
  found = []
  for _ in range(5):
    state, metrics = step(state, batch)
    found.append(metrics.on_host())
  np.testing.assert_allclose(found[0]["train/loss"], first, RTOL, ATOL)
  assert found[-1]["train/loss"] < first
  assert found[-1]["train/accuracy"] == 1.0
  assert found[-1]["preference/margin"] > found[0]["preference/margin"]


def test_a_batch_has_the_fields_that_its_objective_asks_for():
  shape = (2, 4, 16)
  assert abstract_batch(shape, None, Pretraining(CFG)).keys() == FIELDS.keys()
  batch = abstract_batch(shape, None, Preference(CFG))
  assert batch.keys() == {*FIELDS, "reference_logprobs"}
  assert {name: x.dtype for name, x in batch.items() if name in FIELDS} == {
    name: field.dtype for name, field in FIELDS.items()
  }
