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

from ats_jax.step.objective import loss_sums
from ats_jax.step.optimizers.base import decay_rates
from ats_jax.step.schedule import learning_rate

RTOL = 2e-5  # float32; the same terms are summed in another order
# Adam divides by the root of the second moment: where a gradient is near 0 (1e-6 and less), its
# rounding moves each update by a visible share of the step lr = 1e-2.
UPDATE_ATOL = 1e-4
SETTINGS = {
  "optimizer.warmup_steps": 3,
  "optimizer.grad_clip": 0.5,
  "optimizer.ema_decay": 0.7,
  "step.accum_steps": 4,
  "step.z_loss": 1e-2,
  "step.label_smoothing": 0.1,
}


def snapshot(tree):
  """A copy on the host, for the state is donated."""
  return {name: np.array(jax.device_get(x)) for name, x in named_leaves(tree).items()}


def float64(tree):
  return {k: v.astype(np.float64) for k, v in snapshot(tree).items()}


def norm(tree):
  return np.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in tree.values()))


@pytest.mark.compat
def test_several_steps_equal_a_plain_optax_loop(mesh):
  """Of micro-batches; the state is donated, the step compiles once, each has a rate of its own."""
  cfg = tiny_config(SETTINGS)
  program, state = canonical.program(cfg), canonical.state(cfg)
  model = jax.tree.map(jnp.copy, state.model)
  ema, rates = float64(model), []
  o = cfg.optimizer
  decayed = lambda params: jax.tree.map(bool, decay_rates(cfg, params))
  rate = lambda count: learning_rate(cfg, count)
  adamw = optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed)
  tx = optax.chain(optax.clip_by_global_norm(o.grad_clip), adamw)
  opt_state = tx.init(model)

  @jax.jit
  def plain_step(model, opt_state, rows):
    def objective(model):
      sums = loss_sums(model, rows, cfg.step, TRAINING)[0]
      return sums.objective / rows["loss_mask"].sum(), sums

    grads, sums = jax.grad(objective, has_aux=True)(model)
    updates, opt_state = tx.update(grads, opt_state, model)
    norms = optax.tree.norm(grads), optax.tree.norm(updates)
    return optax.apply_updates(model, updates), opt_state, sums, norms

  for step in range(4):
    rows, old = random_rows(cfg, 8, seed=step), state
    tokens = rows["loss_mask"].sum()
    counts = rows["loss_mask"].reshape(4, -1).sum(1)
    assert len(set(counts)) > 1  # ragged: a mean of means would differ
    if not step:
      evaluated = program.eval_step(state.model, rows, program.rules(1))
    state, metrics = canonical.step(cfg, state, micro_batches(rows, 4))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.model, old.opt_state, old.ema)))
    model, opt_state, sums, (grad_norm, update_norm) = plain_step(model, opt_state, rows)
    got = metrics.on_host()
    rates.append(got["train/learning_rate"])
    want = {
      "tokens": tokens,
      "loss": sums.cross_entropy / tokens,  # not the objective
      "accuracy": sums.correct / tokens,
      "z": sums.z / tokens,
      "grad_norm": grad_norm,  # before it is clipped
      "update_norm": update_norm,
      "param_norm": norm(snapshot(model)),
      "scheduled_rate": rates[-1],
      "learning_rate": learning_rate(cfg, jnp.int32(step)),
    }
    for name, value in want.items():
      np.testing.assert_allclose(got[f"train/{name}"], value, 1e-3, err_msg=name)
    if not step:
      np.testing.assert_allclose(evaluated[0] / tokens, got["train/loss"], RTOL)
      assert evaluated[1] == sums.correct and evaluated[2] == tokens
    ema = {k: 0.7 * ema[k] + 0.3 * v for k, v in float64(model).items()}
  assert int(state.step) == 4 and len(set(rates[:3])) == 3
  assert program.train_step._cache_size() == 1
  assert_trees_close(state.model, model, rtol=0, atol=UPDATE_ATOL)
  assert_trees_close(snapshot(state.ema), ema, rtol=0, atol=UPDATE_ATOL)
  assert state.weights is state.ema


@pytest.mark.thorough
def test_the_average_and_the_metrics_of_a_bfloat16_model_are_float32(mesh):
  cfg = tiny_config({"precision.param_dtype": "bfloat16", "optimizer.ema_decay": 0.999})
  state = canonical.state(cfg)
  want = float64(state.model)
  for _ in range(5):
    state, metrics = canonical.step(cfg, state, canonical.rows(cfg))
    want = {k: 0.999 * want[k] + 0.001 * v for k, v in float64(state.model).items()}
  assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
  # It moves by 1e-5 and less a step, which a bfloat16 of size 0.02 (spacing 1e-4) would not show.
  assert_trees_close(snapshot(state.ema), want, rtol=1e-6, atol=1e-8)
  assert metrics.values.dtype == jnp.float32
  np.testing.assert_allclose(metrics["train/param_norm"], norm(snapshot(state.model)), 1e-4)


@pytest.mark.compat
def test_abstract_state_has_the_types_of_the_real_one(mesh):
  cfg = tiny_config(SETTINGS)
  real, abstract = canonical.state(cfg), canonical.program(cfg).init(abstract=True)
  assert jax.tree.structure(real) == jax.tree.structure(abstract)
  types = lambda state: [
    (a.shape, a.dtype, a.ndim and a.sharding.spec) for a in jax.tree.leaves(state)
  ]
  assert types(real) == types(abstract)


def test_the_seed_decides_the_weights(mesh):
  models = (canonical.state(tiny_config(SETTINGS | {"seed": seed})).model for seed in (0, 1))
  same = [np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, models), strict=True)]
  assert sum(same) == 3  # the norm scales, all ones
