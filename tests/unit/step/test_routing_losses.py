"""Losses of sparse layers in the gradient of a step, and the buffers that it moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
  TRAINING,
  assert_trees_close,
  make_decoder,
  micro_batches,
  pack,
  tiny_config,
)

from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.model.stats import LayerStats, MoEStats, StackStats, by_layer
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, Totals, batch_totals, loss_sums, routing_loss
from ats_jax.step.parts.sparse import RESCUE_RATE, bias_rate, with_buffers

SMALL = {
  "model.vocab_size": 16,
  "model.d_model": 8,
  "model.num_heads": 2,
  "model.init_std": 0.4,  # a router that prefers something
  "data.seq_len": 8,
  "moe.num_experts": 4,
  "moe.d_ff": 8,
  "step.loss_chunk_tokens": 64,
}
# Gradients are summed over micro-batches in float32; all before is float64.
RTOL, ATOL = 1e-5, 1e-7


def ragged_rows():
  """8 rows of 8: all lengths, one row of padding only, so that no mean of means is right."""
  rng = np.random.default_rng(0)
  segments, positions = pack([[8], [3, 2], [1], [7], [], [2, 2, 2], [4], [8]], 8)
  tokens = rng.integers(0, 16, (2, 8, 8)).astype(np.int32)
  mask = (segments > 0) & (rng.random((8, 8)) < 0.7)
  return {
    "tokens": tokens[0],
    "targets": tokens[1],
    "loss_mask": mask.astype(np.float32),
    "segment_ids": segments,
    "positions": positions,
  }


def decoder64(cfg):
  """In float64, so that the sums' order decides no routing; with uneven loads."""
  num = numerics(cfg)
  num = dataclasses.replace(num, param_dtype=jnp.float64, compute_dtype=jnp.float64)
  model = jax.jit(lambda key: Decoder(cfg, num, nnx.Rngs(params=key)))(jax.random.key(0))
  for router in routers(model):
    shares = np.random.default_rng(7).dirichlet(np.ones(router.load_E.shape[-1]))
    router.load_E[...] = jnp.broadcast_to(jnp.array(shares), router.load_E.shape)
  return model


def routers(model):
  return [
    layer.mlp.router
    for blocks in model.segments
    for layer in blocks.layers
    if hasattr(layer.mlp, "router")
  ]


@pytest.mark.thorough
def test_each_loss_enters_the_gradient_by_its_formula(mesh):
  """Means over tokens (or rows) of all micro-batches, then over layers; padding counts nowhere."""
  rows = ragged_rows()
  cfg = tiny_config(SMALL | {"moe.num_shared": 1})
  with jax.enable_x64(True):
    model = decoder64(cfg)

    @jax.jit
    def step(model, batch, weights):  # traced, so that one program serves all
      losses = zip(("aux_loss", "sequence_aux_loss", "z_loss"), weights, strict=True)
      weighted = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, **dict(losses)))
      whole, key = batch_totals(batch, TRAINING), jax.random.key(0)
      return sums_and_grads(Pretraining(weighted), model, batch, whole, key, TRAINING)[2]

    @jax.jit
    def plain(params, weights):
      def objective(params):
        full = merge(params, model)
        sums, stats = loss_sums(full, rows, cfg.step, TRAINING)
        moe = by_layer(stats, model.layout, "moe")
        tokens, rows_with_any = np.sum(rows["segment_ids"] > 0), 7
        losses = (
          jnp.mean(moe.balance) / tokens,
          jnp.mean(moe.sequence_balance) / rows_with_any,
          jnp.mean(moe.z) / tokens,
        )
        return sums.objective / rows["loss_mask"].sum() + jnp.dot(weights, jnp.stack(losses))

      return jax.grad(objective)(params)

    by_weight = []
    for weights in (np.zeros(3), *np.diag([0.5, 0.3, 0.2])):
      grads = step(model, micro_batches(rows, 2), weights)
      want = plain(trainable(model), weights)
      assert_trees_close(grads, want, rtol=RTOL, atol=ATOL)
      assert all(np.abs(np.asarray(grad)).max() > 1e-4 for grad in jax.tree.leaves(want))
      by_weight.append(np.asarray(grads.segments[0].layers[0].mlp.router.weight[...]))
  none, *others = by_weight
  effects = [grad - none for grad in others]
  assert all(np.abs(effect).max() > 1e-3 for effect in effects)
  assert np.abs(effects[0] - effects[1]).max() > 1e-3


def abstract(changes):
  """A config and the shapes of its model: dense, then two sparse layers, or as changed."""
  cfg = tiny_config(SMALL | {"model.num_layers": 3, "moe.dense_first": 1} | changes)
  return cfg, jax.eval_shape(lambda: make_decoder(cfg))


def crafted_stats(model, **fields):
  """Statistics [repeats, ...] of every layer with experts; what is not given is 1."""
  segments = []
  for segment in model.layout:
    layers = []
    for kind in segment.kinds:
      ones = dict.fromkeys(MoEStats._fields, jnp.ones(segment.repeats))
      layers.append(LayerStats(MoEStats(**ones | fields) if kind.moe else None, None))
    segments.append(tuple(layers))
  return StackStats(tuple(segments), None)


def test_routing_loss_by_hand(mesh):
  names = {"moe.aux_loss": 0.5, "moe.z_loss": 0.25, "moe.sequence_aux_loss": 0.125}
  whole = Totals(*(jnp.float32(n) for n in (5, 20, 8, 4, 5)))  # as its fields
  cfg, model = abstract(names)
  stats = crafted_stats(
    model,
    balance=jnp.array([30.0, 10.0]),
    z=jnp.array([4.0, 12.0]),
    sequence_balance=jnp.array([7.0, 9.0]),
  )
  want = 0.5 * 40 / (2 * 20) + 0.25 * 16 / (2 * 20) + 0.125 * 16 / (2 * 4)
  np.testing.assert_allclose(routing_loss(cfg, model, stats, whole), want, rtol=1e-6)
  # A layer that skips tokens has seen `places` of them.
  skipping = {"mod.routing": "static", "mod.every": 1, "mod.start_layer": 2}
  cfg, model = abstract(names | skipping)
  stats = crafted_stats(model, balance=jnp.array([30.0]), z=jnp.zeros(1))
  want = 0.5 * (30 / (2 * 20) + 30 / (2 * 8)) + 0.125 * 2 / (2 * 4)
  np.testing.assert_allclose(routing_loss(cfg, model, stats, whole), want, rtol=1e-6)


def test_totals_count_no_padding(mesh):
  rows = ragged_rows()
  whole = batch_totals(micro_batches(rows, 2), Pass(training=True, capacity=0.5))
  assert whole.counted == rows["loss_mask"].sum()
  assert whole.real == 8 + 5 + 1 + 7 + 0 + 6 + 4 + 8
  assert whole.places == 4 + 4 + 1 + 4 + 0 + 4 + 4 + 4
  assert whole.rows == 7


def test_the_bias_is_faster_in_a_collapsed_layer_and_rests_at_the_end():
  violation = jnp.array([0.0, 1.0, 1.125, 1.25, 3.0])

  def rates(step=0, **changes):
    settings = {f"moe.{name}": value for name, value in changes.items()}
    cfg = tiny_config(SMALL | {"num_steps": 100} | settings)
    return bias_rate(cfg, jnp.int32(step), violation)

  for given in (0.005, 0.3):
    fast = max(given, RESCUE_RATE)
    want = [given, given, (given + fast) / 2, fast, fast]
    np.testing.assert_allclose(rates(bias_rate=given), want, rtol=1e-6)
  # A bias on scores has one pace.
  np.testing.assert_allclose(rates(bias_on="scores", bias_rate=0.001), 0.001, rtol=1e-6)
  got = [rates(step, bias_freeze=0.2, bias_rate=0.1)[0] for step in (0, 79, 89, 94, 99)]
  np.testing.assert_allclose(got, [0.1, 0.1, 0.05, 0.025, 0.0], rtol=1e-6)
  np.testing.assert_allclose(rates(98, bias_freeze=0.0, bias_rate=0.1)[0], 0.1, rtol=1e-6)


@pytest.mark.parametrize(
  ("kind", "moves", "changes"),
  [
    # Of 16 choices over 4 open experts 4 would be fair; here they have 8, 4, 3 and 1. The last of
    # four does nothing, and is balanced like the others.
    ("sign", [-1, 0, 1, 1], {"moe.num_experts": 3, "moe.null_experts": 1}),
    ("proportional", [-1, 0, 0.25, 0.75], {"moe.spare_experts": 2}),
    ("none", [0, 0, 0, 0], {}),
  ],
)
def test_the_bias_goes_against_the_load(mesh, kind, moves, changes):
  rate = {"moe.bias_rate": 0.5} if kind != "none" else {}
  cfg = tiny_config(SMALL | {"moe.bias_update": kind} | rate | changes)

  @jax.jit
  def run(start, load):
    model = make_decoder(cfg)
    (router,) = routers(model)
    router.bias_E[...] = start
    stats = crafted_stats(model, load_E=load)
    (new,) = routers(with_buffers(cfg, model, stats, jnp.int32(0), TRAINING))
    return router.bias_E[...], new.bias_E[...], new.load_E[...]

  (router,) = routers(jax.eval_shape(lambda: make_decoder(cfg)))
  slots = router.bias_E.shape[-1]
  is_open = np.ones(slots, bool)
  if "moe.spare_experts" in changes:
    is_open = np.asarray(jax.jit(lambda: routers(make_decoder(cfg))[0].is_open())())[0] > 0
  load, want = np.zeros((2, slots), np.float32), np.zeros((2, slots))
  load[:, is_open] = [[8, 4, 3, 1], [16, 0, 0, 0]]  # the second: four times the fair share
  want[0, is_open] = moves
  want[1, is_open] = [-1, 1, 1, 1] if rate else 0  # moves are bounded
  start = 0.1 * np.arange(2 * slots, dtype=np.float32).reshape(2, -1)
  of_the_given, bias, new_load = run(start, load)
  np.testing.assert_array_equal(of_the_given, start)
  np.testing.assert_allclose(bias, start + 0.5 * want, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(new_load, load / 16, rtol=1e-6)
