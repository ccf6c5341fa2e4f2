"""Routings worked out by hand; test_moe.py compares biases, groups and noise with loops."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import named_leaves, tiny_config

from ats_jax.model.numerics import numerics
from ats_jax.model.param import trainable
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


def test_groups_count_by_their_two_best(mesh):
  """The best expert of all is in a group whose second is poor: it cannot be reached."""
  router = make({"moe.num_experts": 6, "moe.num_groups": 2, "moe.score": "sigmoid"})
  odds = lambda scores: [math.log(s / (1 - s)) for s in scores]
  x = tokens([odds([0.9, 0.1, 0.1, 0.6, 0.5, 0.05]), odds([0.4, 0.3, 0.4, 0.7, 0.05, 0.04])])
  routing, _ = route(router, x, np.ones((1, 2), bool))
  assert chosen(routing) == [[[3, 4], [0, 2]]]  # 1.1 over 1.0; 0.8 over 0.75, not 1.1 of three


def test_idle_slots_are_spread_and_closed(mesh):
  experts, groups = 6, 3
  sizes = {"moe.num_experts": experts, "moe.spare_experts": 3}
  router = make(sizes | {"moe.num_groups": groups, "moe.top_groups": 2})
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


def test_what_is_trained(mesh):
  router = make({"moe.spare_experts": 2, "moe.router_bias": True})
  assert {*named_leaves(trainable(router))} == {".weight.value", ".offset.value"}
