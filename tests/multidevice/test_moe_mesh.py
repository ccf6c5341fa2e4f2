"""A mixture of experts on meshes of 8 devices: values, gradients and buffers as on one device.

In float64, or a rounding in another order would now and then send a token to another expert.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_test_mesh, named_leaves, tiny_config

from ats_jax.model.moe import MoE
from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.sharding.apply import reshard
from ats_jax.sharding.rules import use_plan

pytestmark = pytest.mark.compat

ONE = (1, 1, 1, 1)
# data, fsdp, tensor, expert
CASES = [("dropless", (1, 1, 2, 4)), ("capacity", (1, 2, 1, 4))]
BATCH, SEQ, WIDTH = 8, 6, 8
RTOL, ATOL = 1e-10, 1e-12

LAYER = {
  "model.d_model": WIDTH,
  "model.num_heads": 2,
  "model.init_std": 0.6,  # so that every gradient is of order 1
  "moe.d_ff": 4,
  "moe.num_shared": 1,
  "moe.expert_bias": True,
}
# Three choices among two experts on a device of four, one expert on a device in capacity
# mode, where one of the four is an idle slot.
DROPLESS = LAYER | {"moe.num_experts": 8, "moe.top_k": 3, "moe.null_experts": 4}
CAPACITY = LAYER | {"moe.num_experts": 3, "moe.spare_experts": 1, "moe.dispatch": "capacity"}
CAPACITY |= {"moe.capacity_factor": 0.8, "moe.drop_policy": "weight"}
MODES = {"dropless": DROPLESS, "capacity": CAPACITY}


def numerics64(cfg):
  num = numerics(cfg)
  return dataclasses.replace(num, param_dtype=jnp.float64, compute_dtype=jnp.float64)


def put(value, born):
  """An array where `born`, which may be abstract, lives on the current mesh."""
  spec = born.sharding.spec if born.ndim else jax.P()
  return jax.device_put(value, jax.sharding.NamedSharding(jax.sharding.get_mesh(), spec))


def like(values, born):
  """`values`, arrays by path, in the places of a tree of the current mesh."""
  pick = lambda path, leaf: put(values[jax.tree_util.keystr(path)], leaf)
  return jax.tree_util.tree_map_with_path(pick, born)


def on_host(tree):
  return {name: np.array(leaf) for name, leaf in named_leaves(tree).items()}


def assert_close(got, want, rtol=RTOL, atol=ATOL):
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol, atol, err_msg=name)


@functools.cache
def weights(mode):
  """Of the layer, made once; buffers that are not the initial ones."""
  cfg = tiny_config(MODES[mode])
  with jax.set_mesh(make_test_mesh(*ONE)):
    layer = MoE(cfg, numerics64(cfg), nnx.Rngs(params=jax.random.key(0)))
  values, rng = on_host(layer), np.random.default_rng(0)
  for name in values:
    if ".load_E" in name:
      values[name] = rng.dirichlet(np.ones(values[name].size))
    if name.removesuffix(".value").endswith(".bias"):  # of experts, 0 at first
      values[name] = rng.standard_normal(values[name].shape)
  return values


def biases(mode, pull):
  """All 0, or such that every token wants the experts of one device first."""
  number = {"dropless": 12, "capacity": 4}[mode]
  return 50.0 * (np.arange(number) < 2) if pull else np.zeros(number)


def make_layer(mode, values, changes=()):
  """The layer on the current mesh."""
  cfg = tiny_config(MODES[mode] | dict(changes))
  born = jax.eval_shape(lambda: MoE(cfg, numerics64(cfg), nnx.Rngs(params=jax.random.key(1))))
  return like(values, born)


def inputs():
  """Activations of documents that leave 0 to 6 places of a row empty, and a cotangent."""
  rng, shape = np.random.default_rng(3), (BATCH, SEQ, WIDTH)
  valid = np.arange(SEQ) < np.array([6, 6, 3, 0, 5, 1, 6, 4])[:, None]
  return rng.standard_normal(shape), valid, rng.standard_normal(shape)


def value_and_gradients(layer, x, valid, cotangent):
  """The objective; output, statistics and all gradients."""
  x = reshard(x, "batch", "seq", "act_embed")
  valid = reshard(valid, "batch", "seq")
  cotangent = reshard(cotangent, "batch", "seq", "act_embed")

  def objective(params, x):
    y, stats = merge(params, layer)(x, valid, training=True, key=None)
    losses = 0.3 * stats.balance + 0.7 * stats.sequence_balance + 0.2 * stats.z
    return jnp.sum(y * cotangent) + losses, (y, stats)

  (value, (y, stats)), (d_params, dx) = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(
    trainable(layer), x
  )
  return value, {"y": y, "dx": dx, "stats": stats, "grads": d_params}


COMPILED = jax.jit(value_and_gradients)
NO_OVERFLOW = {"['stats'].overflow": np.zeros(())}  # which differs between meshes


@functools.cache
def run(mode, shape, pull=False, changes=()):
  plan = use_plan("default", hosts=dict(changes).get("moe.exchange.hosts", 1))
  with jax.enable_x64(True), jax.set_mesh(make_test_mesh(*shape)), plan:
    layer = make_layer(mode, weights(mode), changes)
    layer.router.bias_E[...] = jnp.array(biases(mode, pull))
    return on_host(COMPILED(layer, *inputs())[1])


@pytest.mark.parametrize(
  ("mode", "shape"), [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.mesh)]
)
def test_a_layer_equals_that_of_one_device(mode, shape):
  for pull in (False, True):
    one = run(mode, ONE, pull)
    assert_close(run(mode, shape, pull) | NO_OVERFLOW, one)
    assert (one["['stats'].dropped"] > 0) == (mode == "capacity")
    for name, value in one.items():
      if "stats" not in name:
        assert np.abs(value).max() > 1e-2, name  # there is something to compare
    load = one["['stats'].load_E"]
    tokens = inputs()[1].sum()
    assert (load[:2].tolist() == [tokens] * 2) == pull  # more than the fair share of a device


# test_hierarchical_exchange.py has the one in two steps alone.
EXCHANGES = [
  ("allgather", (1, 1, 1, 4), 1),
  ("hierarchical", (1, 2, 1, 4), 2),
]


@pytest.mark.mesh
@pytest.mark.parametrize(("how", "shape", "hosts"), EXCHANGES)
def test_each_exchange_equals_one_device_with_and_without_overflow(how, shape, hosts):
  """Room for the mean alone, and all tokens want two experts of one device first, or do not."""
  changes = {"moe.exchange": how, "moe.exchange.factor": 1.0}
  changes |= {"moe.exchange.hosts": hosts} if hosts > 1 else {}
  for pull in (False, True):
    many, one = run("dropless", shape, pull, tuple(changes.items())), run("dropless", ONE, pull)
    assert_close(many | NO_OVERFLOW, one)
    assert one["['stats'].overflow"] == 0
    assert not pull or many["['stats'].overflow"] > 0


@pytest.mark.mesh
def test_overflow_counts_the_rows_beyond_the_room():
  """By hand: each token sends two rows to the first device, which has room for the mean."""
  changes = (("moe.exchange", "allgather"), ("moe.exchange.factor", 1.0))
  stats = run("dropless", (1, 1, 1, 4), True, changes)
  room = BATCH * SEQ * 3 // 4
  by_device = stats["['stats'].load_E"][:8].reshape(4, 2).sum(axis=1)
  assert by_device[0] == 2 * inputs()[1].sum() > room
  assert (by_device[1:] <= room).all()
  assert stats["['stats'].overflow"] == by_device[0] - room


@pytest.mark.mesh
def test_gradients_are_the_slopes_of_the_values_on_the_mesh_itself():
  """So that a factor common to all meshes would show as well."""
  mode, shape = CASES[0]
  step, rng = 1e-6, np.random.default_rng(1)
  x, valid, cotangent = inputs()
  gradients = run(mode, shape)
  with jax.enable_x64(True), jax.set_mesh(make_test_mesh(*shape)):
    value = lambda values, x: float(COMPILED(make_layer(mode, values), x, valid, cotangent)[0])
    start = weights(mode) | {".router.bias_E": biases(mode, False)}
    trained = [name for name in start if f"['grads']{name}" in gradients]
    assert len(trained) == 10
    for name in trained:
      direction = rng.standard_normal(start[name].shape)
      moved = (start | {name: start[name] + s * direction} for s in (step, -step))
      up, down = (value(values, x) for values in moved)
      slope = np.sum(direction * gradients[f"['grads']{name}"])
      np.testing.assert_allclose((up - down) / (2 * step), slope, 1e-6, err_msg=name)
    direction = rng.standard_normal(x.shape)
    up, down = (value(start, x + s * direction) for s in (step, -step))
    slope = np.sum(direction * gradients["['dx']"])
    np.testing.assert_allclose((up - down) / (2 * step), slope, 1e-6)
