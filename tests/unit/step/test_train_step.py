"""The update as a whole: accumulation, metrics, the average of the weights, donation."""

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  TRAINING,
  assert_trees_close,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
)

from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, batch_totals, loss_sums
from ats_jax.step.optimizers.base import decay_mask
from ats_jax.step.program import make_program
from ats_jax.step.schedule import learning_rate

# float32; the same terms are summed in another order.
RTOL, ATOL = 2e-5, 1e-7
# Adam divides by the root of the second moment: where a gradient is near 0 (1e-6 and less), its
# rounding moves the update by a visible share of the step lr = 1e-2.
UPDATE_ATOL = 2e-5
# Reductions are promised in float32 even where weights and gradients are bfloat16.
NORM_RTOL = 1e-4


def to_device(batch):
  return {k: jnp.asarray(v) for k, v in batch.items()}


def snapshot(tree):
  """A copy on the host, for the state is donated."""
  return {name: np.array(jax.device_get(x)) for name, x in named_leaves(tree).items()}


def float64(tree):
  return {k: v.astype(np.float64) for k, v in snapshot(tree).items()}


@pytest.mark.thorough
def test_accumulation_does_not_change_gradient_or_update(mesh):
  changes = {"step.z_loss": 1e-2, "step.label_smoothing": 0.1, "optimizer.grad_clip": 0.0}
  rows = random_rows(tiny_config(), 8, seed=1)
  counts = rows["loss_mask"].reshape(4, -1).sum(1)
  assert len(set(counts)) == 4  # ragged: a mean of means would differ
  results = []
  for accum in (1, 4):
    cfg = tiny_config(changes | {"step.accum_steps": accum})
    state, metrics = canonical.step(cfg, canonical.state(cfg), micro_batches(rows, accum))
    (adam, _) = state.opt_state
    grads = jax.tree.map(lambda m, b1=cfg.optimizer.b1: m / (1 - b1), adam.mu)  # after one update
    results.append((grads, metrics.values, state.model))
  (want_grads, want_metrics, want_model), (grads, metrics, model) = results
  assert_trees_close(grads, want_grads, rtol=1e-4, atol=ATOL)
  np.testing.assert_allclose(metrics, want_metrics, RTOL)
  assert_trees_close(model, want_model, rtol=0, atol=UPDATE_ATOL)


def grads_of(cfg, model, batch, key):
  """Loss sums and gradients of a dense model."""
  whole = batch_totals(batch, TRAINING)
  sums, _, grads = sums_and_grads(Pretraining(cfg), model, batch, whole, key, TRAINING)
  return sums, grads


def test_the_gradient_is_that_of_the_token_mean(mesh):
  cfg = tiny_config({"step.z_loss": 1e-2})
  rows, model = random_rows(cfg, 4), canonical.model(cfg)
  tokens = rows["loss_mask"].sum()
  want = jax.jit(jax.grad(lambda m: loss_sums(m, rows, cfg.step, TRAINING)[0].objective / tokens))(
    model
  )
  f = lambda m: grads_of(cfg, m, micro_batches(rows, 2), jax.random.key(0))[1]
  assert_trees_close(jax.jit(f)(model), want, rtol=1e-4, atol=ATOL)


@pytest.mark.compat
def test_several_steps_equal_a_plain_optax_loop(mesh):
  """The state is donated, the step compiles once, and each step has a rate of its own."""
  cfg = tiny_config(
    {"optimizer.warmup_steps": 3, "optimizer.grad_clip": 0.5, "optimizer.ema_decay": 0.7}
  )
  program, state = canonical.program(cfg), canonical.state(cfg)
  model = jax.tree.map(jnp.copy, state.model)
  ema, rates = float64(model), []
  o = cfg.optimizer
  tx = optax.chain(
    optax.clip_by_global_norm(o.grad_clip),
    optax.adamw(
      lambda count: learning_rate(cfg, count),
      b1=o.b1,
      b2=o.b2,
      eps=o.eps,
      weight_decay=o.weight_decay,
      mask=lambda p: decay_mask(p, embeddings=False),
    ),
  )
  opt_state = tx.init(model)

  @jax.jit
  def plain_step(model, opt_state, rows):
    sums = lambda m: loss_sums(m, rows, cfg.step, TRAINING)[0]
    objective = lambda m: sums(m).objective / rows["loss_mask"].sum()
    updates, opt_state = tx.update(jax.grad(objective)(model), opt_state, model)
    return optax.apply_updates(model, updates), opt_state

  for step in range(4):
    rows, old = to_device(random_rows(cfg, 8, seed=step)), state
    state, metrics = canonical.step(cfg, state, micro_batches(rows, 1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.model, old.opt_state, old.ema)))
    rates.append(float(metrics["train/learning_rate"]))
    model, opt_state = plain_step(model, opt_state, rows)
    ema = {k: 0.7 * ema[k] + 0.3 * v for k, v in float64(model).items()}
  assert int(state.step) == 4 and len(set(rates[:3])) == 3
  assert program.train_step._cache_size() == 1
  assert_trees_close(state.model, model, rtol=0, atol=UPDATE_ATOL)
  assert_trees_close(snapshot(state.ema), ema, rtol=0, atol=UPDATE_ATOL)
  assert state.weights is state.ema


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.thorough
def test_metrics(mesh, param_dtype):
  cfg = tiny_config({"precision.param_dtype": param_dtype, "optimizer.grad_clip": 1e-3})
  state, rows = canonical.state(cfg), random_rows(cfg, 8)
  batch, tokens = micro_batches(rows, 1), rows["loss_mask"].sum()
  sums, grads = jax.jit(lambda m: grads_of(cfg, m, batch, state.key))(state.model)
  before = snapshot(state.model)
  state, metrics = canonical.step(cfg, state, batch)
  after = snapshot(state.model)
  norm = lambda tree: np.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in tree.values()))
  got = metrics.on_host()
  assert metrics.values.dtype == jnp.float32
  assert got["train/tokens"] == tokens
  np.testing.assert_allclose(got["train/loss"], float(sums.cross_entropy) / tokens, RTOL)
  np.testing.assert_allclose(got["train/accuracy"], float(sums.correct) / tokens, RTOL)
  np.testing.assert_allclose(got["train/z"], float(sums.z) / tokens, RTOL)
  np.testing.assert_allclose(got["train/grad_norm"], norm(snapshot(grads)), NORM_RTOL)  # unclipped
  np.testing.assert_allclose(got["train/param_norm"], norm(after), NORM_RTOL)
  for name in ("train/learning_rate", "train/scheduled_rate"):
    np.testing.assert_allclose(got[name], learning_rate(cfg, jnp.int32(0)), RTOL)
  if param_dtype == "float32":  # in bfloat16 the parameters cannot show what the update was
    update = norm({k: after[k] - before[k] for k in before})
    np.testing.assert_allclose(got["train/update_norm"], update, 1e-4)


def test_accuracy_and_loss_are_plain_whatever_the_objective(mesh):
  rows = random_rows(tiny_config(), 8)
  tokens = rows["loss_mask"].sum()
  vectors = []
  for changes in ({}, {"step.z_loss": 0.1, "step.label_smoothing": 0.3}):
    cfg = canonical.config("dense", changes)
    vector = np.asarray(canonical.step(cfg, canonical.state(cfg), micro_batches(rows, 1))[1].values)
    vectors.append(vector)
  program = canonical.program(cfg)
  sums = program.eval_step(canonical.state(cfg).model, rows, program.rules(1))
  np.testing.assert_allclose(sums[0] / tokens, vector[0], RTOL)  # train/loss
  assert float(sums[1]) == round(vector[1] * tokens) and float(sums[2]) == tokens
  np.testing.assert_allclose(vectors[0][:3], vectors[1][:3], RTOL)
  assert abs(vectors[0][3] - vectors[1][3]) > 1e-3  # the gradients do differ


@pytest.mark.thorough
def test_the_average_of_a_bfloat16_model_is_float32(mesh):
  cfg = tiny_config({"precision.param_dtype": "bfloat16", "optimizer.ema_decay": 0.999})
  state = canonical.state(cfg)
  want = float64(state.model)
  batch = to_device(canonical.rows(cfg))
  for _ in range(5):
    state, _ = canonical.step(cfg, state, batch)
    want = {k: 0.999 * want[k] + 0.001 * v for k, v in float64(state.model).items()}
  assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
  # It moves by 1e-5 and less a step, which a bfloat16 of size 0.02 (spacing 1e-4) would not show.
  assert_trees_close(snapshot(state.ema), want, rtol=1e-6, atol=1e-8)


@pytest.mark.compat
def test_abstract_state_has_the_types_of_the_real_one(mesh):
  cfg = tiny_config({"optimizer.ema_decay": 0.9})
  real, abstract = canonical.state(cfg), canonical.program(cfg).init(abstract=True)
  assert jax.tree.structure(real) == jax.tree.structure(abstract)
  types = lambda state: [
    (a.shape, a.dtype, a.ndim and a.sharding.spec) for a in jax.tree.leaves(state)
  ]
  assert types(real) == types(abstract)


def test_the_seed_decides_the_weights(mesh):
  first = canonical.state(canonical.config("dense")).model
  again, other = (make_program(canonical.config("dense", {"seed": s})).init().model for s in (0, 1))
  pairs = lambda a, b: zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  same = lambda a, b: [np.array_equal(x, y) for x, y in pairs(a, b)]
  assert all(same(first, again))
  assert sum(same(first, other)) == 3  # the norm scales, all ones
