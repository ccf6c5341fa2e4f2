"""Routings small enough to work out by hand; test_moe.py compares the rest with plain loops."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import named_leaves, tiny_config

from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.model.router import Router
from ats_jax.sharding.apply import reshard

WIDTH = 8
RTOL = 1e-5  # float32


def make(changes=None, param_dtype=jnp.float32):
  """A router of 4 experts whose logits are the first numbers of a token."""
  sizes = {"model.d_model": WIDTH, "model.num_heads": 2, "moe.num_experts": 4}
  cfg = tiny_config(sizes | (changes or {}))
  num = dataclasses.replace(numerics(cfg), param_dtype=param_dtype)
  router = Router(cfg, num, nnx.Rngs(params=jax.random.key(0)))
  router.weight[...] = jnp.eye(WIDTH, router.bias_E.shape[0], dtype=router.weight.dtype)
  return router


@jax.jit
def route(router, x, valid, key=None):
  x = reshard(x, "batch", "seq", "act_embed")
  return router(x, reshard(valid, "batch", "seq"), key)


def tokens(*rows):
  """Activations [rows, seq, WIDTH] that start with these logits, the rest 0."""
  x = np.zeros((len(rows), len(rows[0]), WIDTH), np.float32)
  for b, row in enumerate(rows):
    for t, logits in enumerate(row):
      x[b, t, : len(logits)] = logits
  return x


def chosen(routing):
  return np.asarray(routing.expert_BTK).tolist()


def crafted():
  """Two rows, 3 tokens and 1, from probabilities; logsumexps ln 2, ln 3, 0 and 0; padding."""
  log = np.log
  x = tokens(
    [
      log([0.8, 0.6, 0.4, 0.2]),
      log([0.3, 0.6, 0.9, 1.2]),
      log([0.5, 0.125, 0.25, 0.125]),
      [50.0, -3.0, 2.0, 1.0],
    ],
    [log([0.1, 0.1, 0.2, 0.6]), [9.0, 9.0, 9.0, 9.0], [0.0] * 4, [-7.0, 0.0, 0.0, 0.0]],
  )
  return x, np.array([[True, True, True, False], [True, False, False, False]])


def test_choices_and_statistics_worked_out_by_hand(mesh):
  router = make({"moe.renormalize": False})
  router.load_E[...] = jnp.array([0.25, 0.25, 0.5, 0.0])
  routing, stats = route(router, *crafted())
  assert chosen(routing) == [
    [[0, 1], [3, 2], [0, 2], [4, 4]],
    [[3, 2], [4, 4], [4, 4], [4, 4]],
  ]
  valid = crafted()[1]
  want = [[0.4, 0.3], [0.4, 0.3], [0.5, 0.25], [0.6, 0.2]]
  np.testing.assert_allclose(np.asarray(routing.weight_BTK)[valid], want, RTOL)
  entropy = lambda *p: -sum(q * math.log(q) for q in p)
  by_hand = {
    "tokens": 4,
    "load_E": [2, 1, 3, 2],
    # Sums of probabilities: 1.1, 0.725, 0.95, 1.225.
    "balance": 4 * (0.25 * 1.1 + 0.25 * 0.725 + 0.5 * 0.95),
    # Row 1: shares 2, 1, 2, 1 of 6 choices, means 1, 0.625, 0.75, 0.625 over 3. Row 2: one token.
    "sequence_balance": 4 * (2 * 1 + 1 * 0.625 + 2 * 0.75 + 1 * 0.625) / (6 * 3)
    + 4 * (0.5 * 0.2 + 0.5 * 0.6),
    "z": math.log(2) ** 2 + math.log(3) ** 2,
    "entropy": 2 * entropy(0.4, 0.3, 0.2, 0.1)
    + entropy(0.5, 0.25, 0.125, 0.125)
    + entropy(0.1, 0.1, 0.2, 0.6),
    "confidence": 0.4 + 0.4 + 0.5 + 0.6,
    "dropped": 0,
    "overflow": 0,
  }
  assert by_hand.keys() == set(stats._fields)
  for name, value in by_hand.items():
    np.testing.assert_allclose(getattr(stats, name), value, RTOL, atol=1e-5, err_msg=name)


def test_probabilities_of_sigmoid_scores_are_their_shares(mesh):
  scores = np.array([0.8, 0.4, 0.2, 0.6])
  x = tokens([np.log(scores / (1 - scores))])
  routing, stats = route(make({"moe.score": "sigmoid"}), x, np.ones((1, 1), bool))
  assert chosen(routing) == [[[0, 3]]]
  np.testing.assert_allclose(routing.weight_BTK[0, 0], [0.8 / 1.4, 0.6 / 1.4], RTOL)
  np.testing.assert_allclose(stats.confidence, 0.4, RTOL)
  np.testing.assert_allclose(stats.entropy, -sum(p * math.log(p) for p in scores / 2), RTOL)


def test_balanced_routing_has_a_balance_loss_of_one(mesh):
  for changes in ({}, {"moe.spare_experts": 3, "moe.null_experts": 2}):
    router = make(changes)
    x, valid = tokens([[0.0] * 4] * 5, [[0.0] * 4] * 5), np.ones((2, 5), bool)
    _, stats = route(router, x, valid)
    np.testing.assert_allclose(stats.balance, 10.0, RTOL)  # one a token
    np.testing.assert_allclose(stats.sequence_balance, 2.0, RTOL)  # one a row


def test_the_bias_chooses_but_does_not_weigh(mesh):
  router = make({"moe.renormalize": False, "moe.route_scale": 2.0})
  x, valid = tokens([np.log([0.4, 0.3, 0.2, 0.1])]), np.ones((1, 1), bool)
  plain, stats = route(router, x, valid)
  assert chosen(plain) == [[[0, 1]]]
  router.bias_E[...] = jnp.array([0.0, 0.0, 0.0, 1.2])  # log(0.3 / 0.1) = 1.1
  biased, biased_stats = route(router, x, valid)
  assert chosen(biased) == [[[0, 3]]]
  np.testing.assert_allclose(biased.weight_BTK[0, 0], [0.8, 0.2], RTOL)
  for name in ("z", "entropy", "confidence", "balance"):
    np.testing.assert_array_equal(getattr(biased_stats, name), getattr(stats, name))


def test_groups_count_by_their_two_best(mesh):
  """The best expert of all is in a group whose second is poor: it cannot be reached."""
  router = make({"moe.num_experts": 6, "moe.num_groups": 2, "moe.score": "sigmoid"})
  odds = lambda scores: [math.log(s / (1 - s)) for s in scores]
  x = tokens([odds([0.9, 0.1, 0.1, 0.6, 0.5, 0.05]), odds([0.4, 0.3, 0.4, 0.7, 0.05, 0.04])])
  routing, _ = route(router, x, np.ones((1, 2), bool))
  assert chosen(routing) == [[[3, 4], [0, 2]]]  # 1.1 over 1.0; 0.8 over 0.75, not 1.1 of three


def test_groups_count_by_their_best(mesh):
  router = make({"moe.num_experts": 6, "moe.num_groups": 2, "moe.group_score": "max"})
  logits = lambda *p: np.log(p)
  x = tokens([logits(0.3, 0.05, 0.05, 0.25, 0.25, 0.1), logits(0.2, 0.2, 0.2, 0.3, 0.05, 0.05)])
  routing, _ = route(router, x, np.ones((1, 2), bool))
  assert chosen(routing) == [[[0, 1], [3, 4]]]  # by two: 0.35 under 0.5, 0.4 over 0.35


def test_a_bias_on_scores_chooses_and_does_not_weigh(mesh):
  """A score of 0.3 with a bias of 0.25 is above one of 0.5; as logits it would be below."""
  odds = lambda scores: [math.log(s / (1 - s)) for s in scores]
  x, valid = tokens([odds([0.6, 0.5, 0.3, 0.1])]), np.ones((1, 1), bool)
  for bias_on, want in (("scores", [0, 2]), ("logits", [0, 1])):
    router = make({"moe.score": "sigmoid", "moe.bias_on": bias_on, "moe.renormalize": False})
    router.bias_E[...] = jnp.array([0.0, 0.0, 0.25, 0.0])
    routing, _ = route(router, x, valid)
    assert chosen(routing) == [[want]]
    weights = [[0.6, 0.3 if bias_on == "scores" else 0.5]]
    np.testing.assert_allclose(routing.weight_BTK[0], weights, RTOL)


def test_noise_comes_from_the_key_and_changes_choices_only(mesh):
  router = make({"moe.noise": 3.0, "moe.renormalize": False})
  p = [0.4, 0.3, 0.2, 0.1]
  x, valid = tokens([np.log(p)] * 64), np.ones((1, 64), bool)
  (clean, stats), (one, noisy_stats), (again, _), (other, _) = (
    route(router, x, valid, key) for key in (None, *map(jax.random.key, (1, 1, 2)))
  )
  assert chosen(clean) == [[[0, 1]] * 64]
  assert chosen(one) == chosen(again) != chosen(other)
  assert {e for [pair] in [chosen(one)] for k in pair for e in k} == {0, 1, 2, 3}
  np.testing.assert_allclose(one.weight_BTK, np.array(p)[np.array(chosen(one))], RTOL)
  np.testing.assert_array_equal(noisy_stats.entropy, stats.entropy)


def test_null_experts_are_nowhere_but_count_and_weigh(mesh):
  router = make({"moe.null_experts": 2})
  x = tokens([np.log([0.1, 0.1, 0.2, 0.05, 0.3, 0.25])])
  routing, stats = route(router, x, np.ones((1, 1), bool))
  assert chosen(routing) == [[[4, 4]]]  # both
  np.testing.assert_array_equal(stats.load_E, [0, 0, 0, 0, 1, 1])
  x = tokens([np.log([0.1, 0.1, 0.25, 0.05, 0.3, 0.2])])
  routing, _ = route(router, x, np.ones((1, 1), bool))
  assert chosen(routing) == [[[4, 2]]]
  np.testing.assert_allclose(routing.weight_BTK[0, 0, 1], 0.25 / 0.55, RTOL)


@pytest.mark.parametrize(("experts", "spare", "groups"), [(6, 2, 1), (6, 3, 3)])
def test_idle_slots_are_spread_and_closed(mesh, experts, spare, groups):
  sizes = {"moe.num_experts": experts, "moe.spare_experts": spare}
  sizes |= {"moe.num_groups": groups, "moe.top_groups": min(2, groups)}
  router = make(sizes)
  active = np.asarray(router.active_S[...])
  np.testing.assert_array_equal(router.is_open(), active)
  assert active.sum() == experts and set(active.tolist()) == {0.0, 1.0}
  assert len(set(active.reshape(groups, -1).sum(axis=1).tolist())) == 1  # as many in each group
  np.testing.assert_allclose(router.load_E[...], active / experts, RTOL)
  # Neither a high logit nor a high bias opens one.
  router.bias_E[...] = jnp.array(9.0 * (1 - active), jnp.float32)
  logits = np.where(active > 0, 0.1 * np.arange(len(active)), 30.0)[:WIDTH]
  x, valid = tokens([logits] * 3), np.ones((1, 3), bool)
  routing, stats = route(router, x, valid)
  assert set(np.ravel(chosen(routing)).tolist()) <= set(np.flatnonzero(active).tolist())
  assert float(stats.z) < 3 * 4.0**2  # of open experts alone
  np.testing.assert_array_equal(stats.load_E[active == 0], 0.0)


def test_a_split_expert_is_open_on_one_side_of_its_plane(mesh):
  """Halves 0 (side +1) and 1 (side -1) of the expert that all tokens want."""
  router = make({"moe.num_experts": 4, "moe.spare_experts": 2, "moe.top_k": 1})
  router.active_S[...] = jnp.ones(6)
  router.side_S[...] = jnp.array([1.0, -1.0, 0, 0, 0, 0])
  direction = np.zeros((6, WIDTH), np.float32)
  direction[:2, 7] = 1.0
  router.direction_SD[...] = jnp.array(direction)
  x = tokens([[5.0, 5.0, 4.0]] * 4)
  x[0, :, 7] = [-1.0, 0.0, 1e-30, 2.0]  # on the plane counts as the positive side
  valid = np.ones((1, 4), bool)
  for penalty, want in [(1e30, [1, 0, 0, 0]), (0.0, [0, 0, 0, 0])]:
    router.penalty_S[...] = jnp.array([penalty, penalty, 0, 0, 0, 0], jnp.float32)
    assert chosen(route(router, x, valid)[0]) == [[[e] for e in want]]


def test_routing_is_float32_whatever_the_rest(mesh):
  router = make(param_dtype=jnp.bfloat16)
  assert router.weight.dtype == jnp.float32
  weight = np.zeros((WIDTH, 4), np.float32)
  weight[:, :2] = [1.0, 1.001]  # logits 8 and 8.008: one number in bfloat16
  router.weight[...] = jnp.array(weight)
  x = jnp.ones((1, 1, WIDTH), jnp.bfloat16)
  routing, stats = route(router, x, np.ones((1, 1), bool))
  assert chosen(routing) == [[[1, 0]]]
  assert routing.weight_BTK.dtype == jnp.float32 and routing.expert_BTK.dtype == jnp.int32
  assert {a.dtype for a in stats} == {jnp.dtype("float32")}


def test_what_is_trained_and_what_is_not(mesh):
  router = make({"moe.spare_experts": 2, "moe.router_bias": True})
  router.load_E[...] = jnp.array([0.7, 0.1, 0.1, 0.0, 0.1, 0.0])
  names = set(named_leaves(trainable(router)))
  assert len(names) == 2 and all(".weight" in n or ".offset" in n for n in names)
  x, valid = tokens([[0.3, -0.2, 0.5, 0.1, 0.7, -0.4]] * 3), np.ones((1, 3), bool)

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(params, name):
    return jax.grad(lambda p: getattr(route(merge(p, router), x, valid)[1], name))(params)

  for name in ("balance", "sequence_balance", "z"):
    got = gradient(trainable(router), name)
    assert np.abs(got.weight[...]).max() > 1e-3 and np.abs(got.offset[...]).max() > 1e-3, name
