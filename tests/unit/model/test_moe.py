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
EPS = 1e-5  # of central differences

SIGMOID = {"moe.score": "sigmoid"}
CAPACITY = {"moe.dispatch": "capacity", "moe.capacity_factor": 1.0}
BY_WEIGHT = CAPACITY | {"moe.drop_policy": "weight"}
FOUR = {"moe.num_experts": 4}
CLAMPED = {"moe.expert_bias": True, "model.activation": "clamped", "model.gate_limit": 0.7}
VARIANTS = {
  "as DeepSeek-V2": {"moe.num_groups": 4, "moe.top_groups": 2, "moe.group_score": "max"}
  | {"moe.renormalize": False, "moe.route_scale": 1.5, "moe.num_shared": 2},
  "spare, null": {"moe.num_experts": 3, "moe.spare_experts": 2, "moe.null_experts": 3} | SIGMOID,
  "capacity, weight": BY_WEIGHT | {"moe.num_shared": 1},
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
  moe = jax.jit(lambda key: MoE(cfg, num, nnx.Rngs(params=key)))(jax.random.key(seed))
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
  return (y * cotangent).sum() + losses


@functools.partial(jax.jit, static_argnames="training")
def run(moe, x, valid, cotangent, *, training=True, key=None):
  """Output, statistics, gradient of the weights, gradient of x."""
  valid = reshard(valid, "batch", "seq")

  def f(params, x):
    x = reshard(x, "batch", "seq", "act_embed")
    y, stats = merge(params, moe)(x, valid, training=training, key=key)
    return objective(y, stats, cotangent), (y, stats)

  (d_params, dx), (y, stats) = jax.grad(f, argnums=(0, 1), has_aux=True)(trainable(moe), x)
  return y, stats, d_params, dx


def check(cfg, moe, got, dropping=False, noise=None):
  """Compare with loops in numpy; gradients along a random direction of each array."""
  x, valid, cotangent = inputs()
  buffers = reference.buffers_of(moe)
  arrays = reference.weights_of(moe) | {"x": x}
  decided = reference.plan(cfg.moe, x, arrays, buffers, valid, noise, dropping=dropping)

  def mixture(arrays):
    weights = {name: array for name, array in arrays.items() if name != "x"}
    return reference.mixture(cfg.moe, cfg.model, arrays["x"], weights, buffers, valid, decided)

  def slope(name, direction):
    up, down = (
      objective(*mixture(arrays | {name: arrays[name] + step * direction}), cotangent)
      for step in (EPS, -EPS)
    )
    return (up - down) / (2 * EPS)

  y, stats, d_params, dx = got
  want_y, want_stats = mixture(arrays)
  np.testing.assert_allclose(y, want_y, RTOL, ATOL)
  for name in stats._fields:
    np.testing.assert_allclose(getattr(stats, name), want_stats[name], RTOL, ATOL, err_msg=name)
  gradients = reference.weights_of(merge(d_params, moe)) | {"x": np.asarray(dx)}
  assert gradients.keys() == arrays.keys()
  for name, gradient in gradients.items():
    direction = np.random.default_rng(len(name)).standard_normal(gradient.shape)
    want = slope(name, direction)
    np.testing.assert_allclose(np.sum(gradient * direction), want, 1e-6, 1e-7, err_msg=name)
    assert abs(want) > 1e-3, name


@pytest.mark.parametrize(
  "changes", thorough_but([*VARIANTS.values()], 0, 1, 2), ids=VARIANTS.keys()
)
def test_values_gradients_and_statistics(mesh, changes):
  with jax.enable_x64(True):
    cfg, moe = make(changes)
    if cfg.moe.spare_experts and cfg.moe.num_groups == 1:
      split_an_expert(moe)
    key = noise = None
    if cfg.moe.noise:
      key = jax.random.key(3)
      noise = np.asarray(jax.random.normal(key, (BATCH, SEQ, moe.router.bias_E.shape[0])))
    dropping = cfg.moe.dispatch == "capacity"
    got = run(moe, *inputs(), key=key)
    check(cfg, moe, got, dropping, noise)
    assert (float(got[1].dropped) > 0) == dropping  # the case is one


def test_padding_goes_nowhere_and_shows_nowhere(mesh):
  with jax.enable_x64(True):
    _, moe = make(VARIANTS["capacity, weight"])
    x, valid, cotangent = inputs()
    want = run(moe, x, valid, cotangent)
    at_padding = lambda a, b: np.where(valid[..., None], a, b)
    got = run(moe, at_padding(x, 37.0 * x[::-1]), valid, at_padding(cotangent, -5.0))
    y, stats, _, dx = got
    assert np.all(np.asarray(y)[~valid] == 0.0) and np.all(np.asarray(dx)[~valid] == 0.0)
    assert float(stats.tokens) == valid.sum() < valid.size
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(a, b)


def test_the_router_of_one_choice_learns_from_the_output(mesh):
  with jax.enable_x64(True):
    cfg, moe = make({"moe.top_k": 1})
    assert cfg.moe.renormalize  # which would make every weight 1
    x, valid, cotangent = inputs()
    got = run(moe, x, valid, cotangent)
    check(cfg, moe, got)
    of_losses = run(moe, x, valid, 0.0 * cotangent)
    weight = lambda found: np.asarray(found[2].router.weight[...])
  assert np.abs(weight(got) - weight(of_losses)).max() > 0.05


def test_evaluation_drops_nothing_and_adds_no_noise(mesh):
  with jax.enable_x64(True):
    cfg, moe = make(CAPACITY | {"moe.noise": 2.0})
    got = run(moe, *inputs(), training=False, key=jax.random.key(0))
    assert float(got[1].dropped) == 0.0
    check(cfg, moe, got)


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
