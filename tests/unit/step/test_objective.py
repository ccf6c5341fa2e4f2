"""Another objective than that of pre-training takes real steps, with gradients of dense math."""

import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
from helpers import TRAINING, assert_trees_close, make_decoder, micro_batches, random_rows

from ats_jax.config.schema import Config
from ats_jax.data.batch import FIELDS, Field
from ats_jax.model.param import trainable
from ats_jax.sharding.mesh import to_global
from ats_jax.step.objective import Contribution, Objective, Pretraining, target_logprobs
from ats_jax.step.program import abstract_batch, make_program

CFG = canonical.config("dense", {"step.accum_steps": 2, "optimizer.grad_clip": 0.0})
BETA = 0.5
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
class Preference(Objective):
  cfg: Config

  @property
  def fields(self):
    return {"reference_logprobs": Field(np.float32, "of another model")}

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


def test_real_steps_minimise_it(mesh):
  rows, objective = random_rows(CFG, CFG.data.batch_size, seed=3), Preference(CFG)
  reference = jax.jit(lambda: make_decoder(CFG, seed=1))()
  rows["reference_logprobs"] = np.asarray(jax.jit(dense_logprobs)(reference, rows))
  program = make_program(CFG, objective)
  state = program.init()
  first, gradients = jax.jit(jax.value_and_grad(dense_preference))(state.model, rows)
  rules = program.training_rules(1)
  step = program.compile_train_step(state, rules)  # knows the fields
  batch = to_global(micro_batches(rows, 2), mesh)
  found = []
  for made in range(5):
    state, metrics = step(state, batch)
    found.append(metrics.on_host())
    if not made:
      adam, _ = state.opt_state
      got = jax.tree.map(lambda m: m / (1 - CFG.optimizer.b1), adam.mu)
      assert_trees_close(got, trainable(gradients), rtol=1e-4, atol=ATOL)
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
