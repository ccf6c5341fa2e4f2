"""Losses of sparse layers in the gradient of a step, and the buffers that it moves."""

import dataclasses
import functools

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import TRAINING, assert_trees_close, micro_batches, named_leaves, pack, tiny_config

from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.model.stats import LayerStats, MoEStats, StackStats, by_layer
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, Totals, batch_totals, loss_sums, routing_loss
from ats_jax.step.parts.sparse import RESCUE_RATE, bias_rate, with_buffers
from ats_jax.step.program import make_program

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


def with_weights(cfg, weights):
  """The balance, sequence and z losses; numbers may be traced, so that one program serves all."""
  names = ("aux_loss", "sequence_aux_loss", "z_loss")
  moe = dataclasses.replace(cfg.moe, **dict(zip(names, weights, strict=True)))
  return dataclasses.replace(cfg, moe=moe)


@functools.cache
def step_of(cfg):
  """Gradients and the buffers afterwards, as the train step has them."""

  @jax.jit
  def step(model, batch, weights):
    weighted = with_weights(cfg, weights)
    key = jax.random.key(0)
    whole = batch_totals(batch, TRAINING)
    _, stats, grads = sums_and_grads(Pretraining(weighted), model, batch, whole, key, TRAINING)
    new = with_buffers(cfg, model, stats, jnp.int32(0), TRAINING)
    buffers = [{"bias": r.bias_E[...], "load": r.load_E[...]} for r in routers(new)]
    return grads, buffers, by_layer(stats, model.layout, "moe")

  return step


DROPLESS = SMALL | {"moe.num_shared": 1}


@pytest.mark.thorough
def test_micro_batches_change_nothing(mesh):
  with jax.enable_x64(True):
    cfg = tiny_config(DROPLESS)
    model, step, weights = decoder64(cfg), step_of(cfg), np.array([0.3, 0.2, 0.1])
    want_grads, want_buffers, _ = step(model, micro_batches(ragged_rows(), 1), weights)
    grads, buffers, _ = step(model, micro_batches(ragged_rows(), 2), weights)
  assert_trees_close(grads, want_grads, rtol=RTOL, atol=ATOL)
  assert_trees_close(buffers, want_buffers, rtol=1e-12, atol=0)
  for name, grad in named_leaves(want_grads).items():
    assert np.abs(np.asarray(grad)).max() > 1e-4, name


def test_each_loss_enters_the_gradient_by_its_formula(mesh):
  """Means over tokens (or rows), then over layers; padding counts nowhere."""
  rows = ragged_rows()
  with jax.enable_x64(True):
    cfg = tiny_config(DROPLESS)
    model, step = decoder64(cfg), step_of(cfg)

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
      grads, *_ = step(model, micro_batches(rows, 1), weights)
      assert_trees_close(grads, plain(trainable(model), weights), rtol=RTOL, atol=ATOL)
      by_weight.append(np.asarray(grads.segments[0].layers[0].mlp.router.weight[...]))
  none, *others = by_weight
  effects = [grad - none for grad in others]
  assert all(np.abs(effect).max() > 1e-3 for effect in effects)
  assert np.abs(effects[0] - effects[1]).max() > 1e-3


def test_the_balance_loss_takes_the_shares_of_the_step_before(mesh):
  """`E * sum_i f_i P_i`, f of the whole last batch, P of the batch at hand."""
  rows, other = ragged_rows(), ragged_rows()
  other["tokens"] = other["tokens"][::-1]
  tokens = np.sum(rows["segment_ids"] > 0)
  with jax.enable_x64(True):
    cfg = tiny_config(DROPLESS)
    model, step = decoder64(cfg), step_of(cfg)
    _, (buffers,), stats = step(model, micro_batches(rows, 2), np.zeros(3))
    np.testing.assert_allclose(np.sum(stats.load_E, axis=1), 2 * tokens)
    f_LE = np.asarray(buffers["load"])
    np.testing.assert_allclose(f_LE, stats.load_E / (2 * tokens), rtol=1e-12)

    (router,) = routers(model)

    def balance(load_LE):
      router.load_E[...] = jnp.array(load_LE)
      return np.asarray(step(model, micro_batches(other, 2), np.zeros(3))[2].balance)

    # The sum of each expert's probabilities, from a load that falls on it alone.
    p_LE = np.stack([balance(np.eye(4)[[e, e]]) / 4 for e in range(4)], axis=1)
    np.testing.assert_allclose(np.sum(p_LE, axis=1), tokens, rtol=1e-12)
    np.testing.assert_allclose(balance(f_LE), 4 * np.sum(f_LE * p_LE, axis=1), rtol=1e-12)
  # Not balanced: there is something to see.
  assert np.all(np.ptp(f_LE, axis=1) > 0.1) and np.all(np.ptp(p_LE, axis=1) > 1.0)


def abstract(changes):
  """A config and the shapes of its model: dense, then two sparse layers, or as changed."""
  cfg = tiny_config(SMALL | {"model.num_layers": 3, "moe.dense_first": 1} | changes)
  return cfg, make_program(cfg).init(abstract=True).model


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
  whole = Totals(*(jnp.float32(n) for n in (5, 20, 8, 4)))  # counted, real, places, rows
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


@pytest.mark.parametrize("given", [0.005, 0.3])
def test_the_bias_is_faster_in_a_collapsed_layer(given):
  cfg = tiny_config(SMALL | {"moe.bias_rate": given})
  violation = jnp.array([0.0, 1.0, 1.125, 1.25, 3.0])
  fast = max(given, RESCUE_RATE)
  want = [given, given, (given + fast) / 2, fast, fast]
  np.testing.assert_allclose(bias_rate(cfg, jnp.int32(0), violation), want, rtol=1e-6)


def test_a_bias_on_scores_has_one_pace():
  cfg = tiny_config(SMALL | {"moe.bias_on": "scores", "moe.bias_rate": 0.001})
  got = bias_rate(cfg, jnp.int32(0), jnp.array([0.0, 3.0]))
  np.testing.assert_allclose(got, 0.001, rtol=1e-6)


def test_the_bias_rests_at_the_end():
  rate, calm = 0.1, jnp.zeros(())
  cfg = tiny_config(SMALL | {"num_steps": 100, "moe.bias_freeze": 0.2, "moe.bias_rate": rate})
  got = [float(bias_rate(cfg, jnp.int32(step), calm)) for step in (0, 79, 89, 94, 99)]
  np.testing.assert_allclose(got, [rate, rate, rate / 2, rate / 4, 0.0], rtol=1e-6)
  cfg = tiny_config(SMALL | {"num_steps": 100, "moe.bias_freeze": 0.0, "moe.bias_rate": rate})
  np.testing.assert_allclose(bias_rate(cfg, jnp.int32(98), calm), rate, rtol=1e-6)


@pytest.mark.parametrize(
  ("kind", "moves", "extra"),
  [
    # Of 16 choices over 4 open experts 4 would be fair; here they have 8, 4, 3 and 1.
    ("sign", [-1, 0, 1, 1], "null"),
    ("proportional", [-1, 0, 0.25, 0.75], "spare"),
    ("none", [0, 0, 0, 0], "plain"),
  ],
)
def test_the_bias_goes_against_the_load(mesh, kind, moves, extra):
  changes = {"moe.bias_update": kind} | ({"moe.bias_rate": 0.5} if kind != "none" else {})
  if extra == "null":  # the last of the four does nothing, and is balanced like the others
    changes |= {"moe.num_experts": 3, "moe.null_experts": 1}
  if extra == "spare":
    changes |= {"moe.spare_experts": 2}
  cfg = tiny_config(SMALL | changes)
  model = canonical.model(cfg)
  (router,) = routers(model)
  is_open = np.asarray(router.is_open()[0]) > 0
  load, want = np.zeros((2, is_open.size)), np.zeros((2, is_open.size))
  load[:, is_open] = [[8, 4, 3, 1], [4, 4, 4, 4]]  # the second layer is balanced
  want[0, is_open] = moves
  start = 0.1 * np.arange(2 * is_open.size).reshape(2, -1)
  router.bias_E[...] = jnp.array(start, jnp.float32)
  stats = crafted_stats(model, load_E=jnp.array(load))
  model = with_buffers(cfg, model, stats, jnp.int32(0), TRAINING)
  np.testing.assert_array_equal(router.bias_E[...], np.float32(start))  # of the model given
  (router,) = routers(model)
  np.testing.assert_allclose(router.bias_E[...], start + 0.5 * want, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(router.load_E[...], load / 16, rtol=1e-6)


def test_proportional_moves_are_bounded(mesh):
  cfg = tiny_config(SMALL | {"model.num_layers": 1, "moe.bias_rate": 0.5})
  model = canonical.model(cfg)
  (router,) = routers(model)
  load = jnp.array([[16.0, 0, 0, 0]])  # four times the fair share: an error of -3
  model = with_buffers(cfg, model, crafted_stats(model, load_E=load), jnp.int32(0), TRAINING)
  (router,) = routers(model)
  np.testing.assert_allclose(router.bias_E[...], [[-0.5, 0.5, 0.5, 0.5]], rtol=1e-6)


@pytest.mark.thorough
def test_no_optimizer_touches_a_buffer(mesh):
  cfg = tiny_config(
    SMALL
    | {"moe.bias_update": "none", "moe.spare_experts": 2, "moe.router_bias": True}
    | {"optimizer.weight_decay": 1.0, "optimizer.ema_decay": 0.5}
  )
  program = make_program(cfg)
  state = program.init()
  (router,) = routers(state.model)
  names = ("bias_E", "active_S", "side_S", "direction_SD", "penalty_S")
  for name in names[:1] + names[2:]:
    old = getattr(router, name)[...]
    getattr(router, name)[...] = 0.05 + 0.0 * old
  before = {name: np.array(getattr(router, name)[...]) for name in names}
  weight, load = np.array(router.weight[...]), np.array(router.load_E[...])
  state, metrics = program.train_step(
    state, micro_batches(ragged_rows(), 1), program.training_rules(1)
  )
  (router,) = routers(state.model)
  for name, value in before.items():
    np.testing.assert_array_equal(getattr(router, name)[...], value, err_msg=name)
  moments = [name for name in named_leaves(state.opt_state) if ".router" in name]
  assert len(moments) == 2 * 2 and all(".weight" in n or ".offset" in n for n in moments)
  assert np.abs(router.weight[...] - weight).max() > 1e-3
  # The load is what the step saw, and what it reports.
  assert np.abs(router.load_E[...] - load).max() > 1e-3
  np.testing.assert_allclose(router.load_E[...], metrics.layers["moe/load"], rtol=1e-6)
  values = metrics.on_host()
  np.testing.assert_allclose(
    values["moe/max_violation"], np.max(metrics.layers["moe/load"]) * 4 - 1, rtol=1e-5
  )
  np.testing.assert_allclose(values["moe/max_bias"], 0.05, rtol=1e-6)
