"""Dropout: its rate, its expectation, and where its randomness comes from."""

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, random_rows, tiny_config

from ats_jax.model.block import dropout
from ats_jax.model.forward_pass import rules_at
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, batch_totals, make_eval_step


def test_rate_and_expectation(mesh):
  rate = 0.1
  x = jnp.full((64, 128, 16), 2.0)
  y = np.asarray(dropout(x, rate, jax.random.key(0)))
  sigma = np.sqrt(rate * (1 - rate) / x.size)
  assert abs(np.mean(y == 0) - rate) < 5 * sigma
  np.testing.assert_allclose(y[y != 0], 2.0 / (1 - rate), rtol=1e-6)
  assert abs(y.mean() - 2.0) < 5 * 2.0 * sigma / (1 - rate)


def test_no_key_or_no_rate_changes_nothing(mesh):
  x = jnp.arange(6.0).reshape(1, 2, 3)
  assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


def dropped_sites(model, tokens, key):
  """Which elements each sub-layer's dropout zeroes, in order of execution."""
  masks = []

  def spy(x, rate, key):
    y = dropout(x, rate, key)
    if key is not None:
      jax.debug.callback(lambda m: masks.append(np.asarray(m)), y == 0, ordered=True)
    return y

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("ats_jax.model.block.dropout", spy)
    ones = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    about = {"positions_BT": positions, "segment_ids_BT": ones, "rules": TRAINING, "key": key}
    jax.block_until_ready(jax.jit(lambda m: m(tokens, **about)[0])(model))
    jax.effects_barrier()
  return masks


def test_every_layer_and_sub_layer_draws_its_own_mask(mesh):
  cfg = tiny_config({"model.dropout": 0.5})
  tokens = np.arange(16, dtype=np.int32)[None]
  masks = dropped_sites(canonical.model(cfg), tokens, jax.random.key(0))
  assert len(masks) == 4
  for i, one in enumerate(masks):
    for other in masks[i + 1 :]:
      assert 0.3 < np.mean(one == other) < 0.7  # independent masks agree half of the time


def test_micro_batches_draw_their_own_masks(mesh):
  cfg = tiny_config({"model.dropout": 0.5})
  model, rows = canonical.model(cfg), random_rows(cfg, 2)
  silent = rows | {"loss_mask": 0 * rows["loss_mask"]}
  tokens = rows["loss_mask"].sum()

  @jax.jit
  def gradient(model, first, second, key):
    batch = {k: jnp.stack([first[k], second[k]]) for k in first}
    whole = batch_totals(batch, TRAINING)._replace(counted=tokens)
    grads = sums_and_grads(Pretraining(cfg), model, batch, whole, key, TRAINING)[2]
    return grads.segments[0].layers[0].mlp.down.weight[...]

  # The same rows as micro-batch 0 and as micro-batch 1; the other one contributes nothing.
  zeroth = gradient(model, rows, silent, jax.random.key(1))
  first = gradient(model, silent, rows, jax.random.key(1))
  np.testing.assert_array_equal(gradient(model, rows, silent, jax.random.key(1)), zeroth)
  assert np.abs(zeroth - first).max() > 0.1 * np.abs(zeroth).max()
  both = gradient(model, rows, rows, jax.random.key(1))
  np.testing.assert_allclose(both, zeroth + first, rtol=1e-5, atol=1e-7)


def test_evaluation_has_no_dropout(mesh):
  rows = random_rows(tiny_config(), 2)
  plain, dropping = tiny_config(), tiny_config({"model.dropout": 0.5})
  rules = rules_at(plain, 0, training=False)
  got, want = (make_eval_step(c)(canonical.model(c), rows, rules) for c in (dropping, plain))
  np.testing.assert_array_equal(got, want)
