"""Dropout: its rate, its expectation, and where its randomness comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_decoder, micro_batches, random_rows, tiny_config

from ats_jax.model.block import dropout
from ats_jax.step.eval_step import make_eval_step
from ats_jax.step.train_step import sums_and_grads


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_expectation(mesh, rate):
  x = jnp.full((64, 128, 16), 2.0)
  y = np.asarray(dropout(x, rate, jax.random.key(0)))
  sigma = np.sqrt(rate * (1 - rate) / x.size)
  assert abs(np.mean(y == 0) - rate) < 5 * sigma
  np.testing.assert_allclose(y[y != 0], 2.0 / (1 - rate), rtol=1e-6)
  assert abs(y.mean() - 2.0) < 5 * 2.0 * sigma / (1 - rate)


def test_no_key_or_no_rate_changes_nothing(mesh):
  x = jnp.arange(6.0).reshape(1, 2, 3)
  assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


def dropped_sites(cfg, model, tokens, key):
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
    jax.block_until_ready(
      jax.jit(lambda m: m(tokens, positions_BT=positions, segment_ids_BT=ones, dropout_key=key))(
        model
      )
    )
    jax.effects_barrier()
  return masks


def test_every_layer_and_sub_layer_draws_its_own_mask(mesh):
  cfg = tiny_config({"model.dropout": 0.5, "model.num_layers": 3})
  tokens = np.arange(16, dtype=np.int32)[None]
  masks = dropped_sites(cfg, make_decoder(cfg), tokens, jax.random.key(0))
  assert len(masks) == 6
  for i, one in enumerate(masks):
    for other in masks[i + 1 :]:
      assert 0.3 < np.mean(one == other) < 0.7  # independent masks agree half of the time


def test_micro_batches_and_steps_draw_their_own_masks(mesh):
  cfg = tiny_config({"model.dropout": 0.5})
  model, rows = make_decoder(cfg), random_rows(cfg, 2)
  # Twice the same micro-batch: with equal masks the gradient would be twice that of one.
  twice = {k: np.stack([v, v]) for k, v in rows.items()}
  tokens = rows["loss_mask"].sum()

  @jax.jit
  def gradient(model, batch, key):
    return sums_and_grads(cfg, model, batch, tokens, key)[1].blocks.mlp.down[...]

  one = gradient(model, micro_batches(rows, 1), jax.random.key(1))
  two = gradient(model, twice, jax.random.key(1))
  other_step = gradient(model, twice, jax.random.key(2))
  np.testing.assert_array_equal(gradient(model, twice, jax.random.key(1)), two)
  far = 0.1 * np.abs(one).max()
  assert np.abs(two - 2 * one).max() > far and np.abs(two - other_step).max() > far


def test_evaluation_has_no_dropout(mesh):
  rows = random_rows(tiny_config(), 2)
  plain, dropping = tiny_config(), tiny_config({"model.dropout": 0.5})
  want = make_eval_step(plain)(make_decoder(plain), rows)
  np.testing.assert_array_equal(make_eval_step(dropping)(make_decoder(dropping), rows), want)
