"""The mixture against plain loops over tokens in float64: values, gradients, statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from flax import nnx
from helpers import thorough_but, tiny_config

from ats_jax.model.layout import expert_capacity
from ats_jax.model.moe import MoE
from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.sharding.apply import reshard

SMALL = {
  "model.d_model": 8,
  "model.num_heads": 2,
  "moe.num_experts": 8,
  "moe.d_ff": 6,
  "model.init_std": 0.6,  # logits of order 1, and residual outputs that show
}
BATCH, SEQ = 2, 6
RTOL, ATOL = 1e-10, 1e-12  # float64; the same sums in another order

SIGMOID = {"moe.score": "sigmoid"}
CAPACITY = {"moe.dispatch": "capacity", "moe.capacity_factor": 1.0}
BY_WEIGHT = CAPACITY | {"moe.drop_policy": "weight"}
FOUR = {"moe.num_experts": 4}
CLAMPED = {"moe.expert_bias": True, "model.activation": "clamped", "model.gate_limit": 0.7}
# The router has 8 outputs in all of them: the loops compile each operation once a shape.
VARIANTS = {
  "four, not renormalised": {"moe.top_k": 4, "moe.renormalize": False, "moe.temperature": 0.5}
  | {"moe.router_bias": True},
  "as DeepSeek-V2": {"moe.num_groups": 4, "moe.top_groups": 2, "moe.group_score": "max"}
  | {"moe.renormalize": False, "moe.route_scale": 1.5, "moe.num_shared": 2},
  "null, shared": FOUR | {"moe.null_experts": 4, "moe.num_shared": 1},
  "spare, null": {"moe.num_experts": 3, "moe.spare_experts": 2, "moe.null_experts": 3} | SIGMOID,
  "capacity, weight": BY_WEIGHT | {"moe.num_shared": 1},
  "one, sigmoid": {"moe.top_k": 1, "moe.route_scale": 0.7} | SIGMOID,
  "noise, biases, clamped": CLAMPED
  | {"moe.noise": 1.5, "moe.temperature": 3.0, "moe.router_bias": True, "moe.num_shared": 1}
  | SIGMOID,
  "as DeepSeek-V3": {"moe.num_groups": 4, "moe.top_groups": 2, "moe.bias_on": "scores"}
  | {"moe.route_scale": 2.5, "moe.num_shared": 1}
  | SIGMOID,
  "spare, groups of one": FOUR | {"moe.spare_experts": 4, "moe.num_groups": 4, "moe.top_groups": 2},
  "capacity, spare": FOUR | CAPACITY | {"moe.spare_experts": 4, "moe.top_k": 3} | SIGMOID,
}


def make(changes, seed=0):
  """A float64 module with a bias and loads that are not the initial ones."""
  cfg = tiny_config(SMALL | changes)
  num = numerics(cfg)
  num = dataclasses.replace(num, param_dtype=jnp.float64, compute_dtype=jnp.float64)
  moe = MoE(cfg, num, nnx.Rngs(params=jax.random.key(seed)))
  rng, router = np.random.default_rng(seed), moe.router
  outputs = router.bias_E.shape[0]
  router.bias_E[...] = jnp.array(rng.normal(0, 0.2, outputs))
  router.load_E[...] = jnp.array(rng.dirichlet(np.ones(outputs)))
  if router.offset is not None:
    router.offset[...] = jnp.array(rng.normal(0, 0.5, outputs))
  for layer in (moe.gate, moe.up, moe.down):
    if layer.bias is not None:
      layer.bias[...] = jnp.array(rng.normal(0, 0.5, layer.bias.shape))
  return cfg, moe


def inputs():
  """Activations, which of them are no padding, and what to multiply the output with."""
  rng, shape = np.random.default_rng(1), (BATCH, SEQ, SMALL["model.d_model"])
  valid = np.arange(SEQ) < np.array([[SEQ], [SEQ - 3]])
  return rng.standard_normal(shape), valid, rng.standard_normal(shape)


def split_an_expert(moe):
  """A slot takes half of an expert: one half is closed on its other side, the other nearly so."""
  router = moe.router
  active, side, penalty, direction = (
    np.array(getattr(router, name)[...])
    for name in ("active_S", "side_S", "penalty_S", "direction_SD")
  )
  halves = [np.flatnonzero(active == 1)[1], np.flatnonzero(active == 0)[0]]
  active[halves], side[halves], penalty[halves] = 1.0, [1.0, -1.0], [1e30, 0.7]
  direction[halves] = np.random.default_rng(5).standard_normal(SMALL["model.d_model"])
  router.active_S[...], router.side_S[...] = jnp.array(active), jnp.array(side)
  router.penalty_S[...], router.direction_SD[...] = jnp.array(penalty), jnp.array(direction)


def objective(y, stats, cotangent):
  """Every path on which a gradient comes: the output, and the three losses."""
  get = stats.get if isinstance(stats, dict) else lambda name: getattr(stats, name)
  losses = 0.3 * get("balance") + 0.7 * get("sequence_balance") + 0.2 * get("z")
  return jnp.sum(y * cotangent) + losses


@functools.partial(jax.jit, static_argnames="training")
def run(moe, x, valid, cotangent, *, training=True, key=None):
  """Output, statistics, gradients by weight, gradient of x."""
  valid = reshard(valid, "batch", "seq")

  def f(params, x):
    x = reshard(x, "batch", "seq", "act_embed")
    y, stats = merge(params, moe)(x, valid, training=training, key=key)
    return objective(y, stats, cotangent), (y, stats)

  (d_params, dx), (y, stats) = jax.grad(f, argnums=(0, 1), has_aux=True)(trainable(moe), x)
  return y, stats, reference.weights_of(d_params), dx


def run_reference(cfg, moe, x, valid, cotangent, dropping, noise):
  # On the host and back: without shardings, which loops over rows have no use for.
  weights = {n: jnp.array(np.asarray(w)) for n, w in reference.weights_of(moe).items()}
  x = jnp.array(x)
  buffers = reference.buffers_of(moe)
  decided = reference.plan(cfg.moe, x, weights, buffers, valid, noise, dropping=dropping)

  def f(weights, x):
    y, stats = reference.mixture(cfg.moe, cfg.model, x, weights, buffers, valid, decided)
    return objective(y, stats, cotangent), (y, stats)

  (d_weights, dx), (y, stats) = jax.grad(f, argnums=(0, 1), has_aux=True)(weights, x)
  return y, stats, d_weights, dx


def check(got, want):
  (y, stats, d_weights, dx), (want_y, want_stats, want_d, want_dx) = got, want
  np.testing.assert_allclose(y, want_y, RTOL, ATOL)
  for name in stats._fields:
    np.testing.assert_allclose(getattr(stats, name), want_stats[name], RTOL, ATOL, err_msg=name)
  assert d_weights.keys() == want_d.keys()
  for name, grad in want_d.items():
    np.testing.assert_allclose(d_weights[name], grad, RTOL, ATOL, err_msg=name)
    assert np.abs(grad).max() > 1e-3, name
  np.testing.assert_allclose(dx, want_dx, RTOL, ATOL)


@pytest.mark.parametrize(
  "changes", thorough_but([*VARIANTS.values()], 1, 3, 4), ids=VARIANTS.keys()
)
def test_values_gradients_and_statistics(mesh, changes):
  with jax.enable_x64(True):
    cfg, moe = make(changes)
    if cfg.moe.spare_experts and cfg.moe.num_groups == 1:
      split_an_expert(moe)
    x, valid, cotangent = inputs()
    key = noise = None
    if cfg.moe.noise:
      key = jax.random.key(3)
      noise = jax.random.normal(key, (BATCH, SEQ, moe.router.bias_E.shape[0]))
    dropping = cfg.moe.dispatch == "capacity"
    want = run_reference(cfg, moe, x, valid, cotangent, dropping, noise)
    got = run(moe, x, valid, cotangent, key=key)
    check(got, want)
    assert (float(got[1].dropped) > 0) == dropping  # the case is one


@pytest.mark.parametrize("variant", ["null, shared", "capacity, weight"])
def test_padding_goes_nowhere_and_shows_nowhere(mesh, variant):
  with jax.enable_x64(True):
    _, moe = make(VARIANTS[variant])
    x, valid, cotangent = inputs()
    want = run(moe, x, valid, cotangent)
    at_padding = lambda a, b: np.where(valid[..., None], a, b)
    y, stats, d_weights, dx = run(
      moe, at_padding(x, 37.0 * x[::-1]), valid, at_padding(cotangent, -5.0)
    )
    assert np.all(np.asarray(y)[~valid] == 0.0) and np.all(np.asarray(dx)[~valid] == 0.0)
    assert float(stats.tokens) == valid.sum() < valid.size
    for a, b in zip(jax.tree.leaves((y, stats, d_weights, dx)), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("changes", [{}, SIGMOID], ids=["softmax", "sigmoid"])
def test_the_router_of_one_choice_learns_from_the_output(mesh, changes):
  with jax.enable_x64(True):
    cfg, moe = make({"moe.top_k": 1} | changes)
    assert cfg.moe.renormalize  # which would make every weight 1
    x, valid, cotangent = inputs()
    of_all, of_losses = (run(moe, x, valid, c)[2]["router"] for c in (cotangent, 0.0 * cotangent))
  assert np.abs(of_all - of_losses).max() > 0.05


def test_evaluation_drops_nothing_and_adds_no_noise(mesh):
  with jax.enable_x64(True):
    _, tight = make(CAPACITY | {"moe.noise": 2.0})
    _, free = make({})
    args, key = inputs(), jax.random.key(0)
    evaluated = run(tight, *args, training=False, key=key)
    assert float(evaluated[1].dropped) == 0.0
    for a, b in zip(jax.tree.leaves(evaluated), jax.tree.leaves(run(free, *args)), strict=True):
      np.testing.assert_allclose(a, b, RTOL, ATOL)
    trained = run(tight, *args, key=key)
    assert float(trained[1].dropped) > 0.0
    assert np.any(trained[1].load_E != evaluated[1].load_E)


@pytest.mark.parametrize(
  ("seq", "top_k", "factor", "experts", "places"),
  [
    (16, 2, 1.25, 4, 10),
    (16, 2, 1.0, 4, 8),
    (7, 2, 0.6, 4, 3),  # 2.1
    (100, 1, 0.55, 1, 55),  # 0.55 * 100 is a hair over 55 in binary
    (8, 1, 9.0, 4, 8),  # a token goes to an expert once
    (8, 1, 0.1, 64, 1),
  ],
)
def test_capacity_is_a_share_of_the_row_rounded_up(seq, top_k, factor, experts, places):
  assert expert_capacity(seq, top_k, factor, experts) == places


@pytest.mark.parametrize(
  ("policy", "kept"),
  [("position", [[1, 2], [0, 1], []]), ("weight", [[4, 5], [0, 3], []])],
)
def test_who_keeps_a_place(mesh, policy, kept):
  """8 tokens, 4 experts, one choice, factor 1: two places in each row, all want expert 0."""
  strength = np.array(
    [
      [99, 2, 1, 3, 9, 8, 2, 1],  # the strongest of all is padding
      [5, 4, 4, 5, 4, 5, 1, 1],  # of equal ones the first
      [1, 2, 3, 4, 5, 6, 7, 8],  # all of it padding
    ]
  )
  valid = np.ones((3, 8), bool)
  valid[0, 0] = valid[2] = False
  with jax.enable_x64(True):
    _, moe = make(FOUR | CAPACITY | {"moe.top_k": 1, "moe.drop_policy": policy})
    weight = np.zeros(moe.router.weight.shape)
    weight[0, 0] = 1.0
    moe.router.weight[...] = jnp.array(weight)
    moe.router.bias_E[...] = jnp.zeros(4)
    x = np.ones((3, 8, SMALL["model.d_model"]))
    x[..., 0] = strength
    y, stats, *_ = run(moe, x, valid, x)
  got = [np.flatnonzero(row).tolist() for row in np.any(np.asarray(y) != 0, axis=-1)]
  assert got == kept
  assert float(stats.dropped) == 15 - 4
  np.testing.assert_array_equal(stats.load_E, [15, 0, 0, 0])  # what was wanted
