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
from helpers import (
  make_test_mesh,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
  when,
)

from ats_jax.model import moe as moe_module
from ats_jax.model.forward_pass import rules_at
from ats_jax.model.moe import MoE
from ats_jax.model.numerics import numerics
from ats_jax.model.param import Buffer, merge, trainable
from ats_jax.sharding.apply import reshard
from ats_jax.sharding.mesh import to_global
from ats_jax.sharding.rules import use_plan
from ats_jax.step.objective import Pretraining
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.program import init_state, make_train_step

pytestmark = pytest.mark.compat

ONE = (1, 1, 1, 1)
# data, fsdp, tensor, expert
MESHES = [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 1, 4), (1, 1, 2, 4)]
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
# Three choices among two experts on a device of (2, 1, 1, 4), one expert on a device in capacity
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
  return like(values, MoE(cfg, numerics64(cfg), nnx.Rngs(params=jax.random.key(1))))


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
  "case",
  [
    pytest.param(case, marks=when(i, quick=(4,), ci=(2, 6)))
    for i, case in enumerate(
      [("dropless", m) for m in MESHES] + [("capacity", m) for m in MESHES[2:4]]
    )
  ],
  ids=str,
)
def test_a_layer_equals_that_of_one_device(case):
  mode, shape = case
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


# Experts over 2, 4 and 8 devices; with fsdp; with tensor; with both.
EXPERT_MESHES = [(1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 1, 8), (1, 2, 1, 4), (2, 1, 2, 2), (1, 2, 2, 2)]


EXCHANGES = [(shape, how) for shape in EXPERT_MESHES for how in ("allgather", "bins")]
EACH_TIME = [EXCHANGES.index((EXPERT_MESHES[1], how)) for how in ("allgather", "bins")]
IN_TURN = [4, 7, 9, 10]  # of the further meshes each with one exchange


@pytest.mark.parametrize(
  ("shape", "how"),
  [pytest.param(*c, marks=when(i, quick=EACH_TIME, ci=IN_TURN)) for i, c in enumerate(EXCHANGES)],
)
def test_each_exchange_equals_one_device_with_and_without_overflow(shape, how):
  """Room for the mean alone, and all tokens want two experts of one device first, or do not."""
  changes = (("moe.exchange", how), ("moe.exchange.factor", 1.0))
  for pull in (False, True):
    many, one = run("dropless", shape, pull, changes), run("dropless", ONE, pull)
    assert_close(many | NO_OVERFLOW, one)
    assert one["['stats'].overflow"] == 0
    if pull and shape[3] > 2:  # of two devices, each has room for what all tokens want first
      assert many["['stats'].overflow"] > 0


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (1, 2, 1, 4)])
@pytest.mark.mesh
def test_an_exchange_in_two_steps_equals_one_device_with_and_without_overflow(shape):
  """Two hosts, with `tensor` and with `fsdp`."""
  changes = {"exchange": "hierarchical", "exchange.hosts": 2, "exchange.factor": 1.0}
  changes = tuple((f"moe.{name}", value) for name, value in changes.items())
  for pull in (False, True):
    many, one = run("dropless", shape, pull, changes), run("dropless", ONE, pull)
    assert_close(many | NO_OVERFLOW, one)
    assert not pull or many["['stats'].overflow"] > 0


def test_overflow_counts_the_rows_beyond_the_room():
  """By hand: each token sends two rows to the first device, which has room for the mean."""
  changes = (("moe.exchange", "allgather"), ("moe.exchange.factor", 1.0))
  stats = run("dropless", (1, 1, 1, 4), True, changes)
  room = BATCH * SEQ * 3 // 4
  by_device = stats["['stats'].load_E"][:8].reshape(4, 2).sum(axis=1)
  assert by_device[0] == 2 * inputs()[1].sum() > room
  assert (by_device[1:] <= room).all()
  assert stats["['stats'].overflow"] == by_device[0] - room


@pytest.mark.parametrize("mode", ["dropless", pytest.param("capacity", marks=pytest.mark.slow)])
def test_gradients_are_the_slopes_of_the_values_on_the_mesh_itself(mode):
  """So that a factor common to all meshes would show as well."""
  step, rng = 1e-6, np.random.default_rng(1)
  x, valid, cotangent = inputs()
  gradients = run(mode, (1, 2, 2, 2))
  with jax.enable_x64(True), jax.set_mesh(make_test_mesh(1, 2, 2, 2)):
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


def test_the_comparison_sees_a_factor_in_an_island(monkeypatch):
  """As a sum over devices with the wrong derivative would bring it."""
  right = moe_module.all_sum

  def twice_the_derivative(x, axis):
    total = right(x, axis)
    return 2 * total - jax.lax.stop_gradient(total)

  monkeypatch.setattr(moe_module, "all_sum", twice_the_derivative)
  with jax.enable_x64(True), jax.set_mesh(make_test_mesh(2, 2, 2, 1)):
    layer = make_layer("dropless", weights("dropless"))
    layer.router.bias_E[...] = jnp.array(biases("dropless", False))
    wrong = on_host(jax.jit(lambda *args: value_and_gradients(*args))(layer, *inputs())[1])
  one = run("dropless", ONE)
  np.testing.assert_allclose(wrong["['y']"], one["['y']"], RTOL, ATOL)
  down = "['grads'].down"
  name = next(name for name in one if name.startswith(down))
  with pytest.raises(AssertionError, match="down"):
    assert_close({name: wrong[name]}, {name: one[name]})
  np.testing.assert_allclose(wrong[name], 2 * one[name], RTOL, ATOL)  # and nothing else is wrong


STEP = {
  "model.num_layers": 2,
  "model.num_kv_heads": 2,
  "data.seq_len": 8,
  "data.batch_size": 16,
  "step.accum_steps": 2,
  "optimizer.grad_clip": 0.0,
  "moe.aux_loss": 0.3,
  "moe.sequence_aux_loss": 0.2,
  "moe.z_loss": 0.1,
}


@functools.cache
def train_step(mode, shape):
  """Gradients (of the first moment), buffers and metrics of one update."""
  more = {"moe.noise": 0.3, "step.remat": "names"} if mode == "dropless" else {}
  cfg = tiny_config(MODES[mode] | STEP | more)
  mesh = make_test_mesh(*shape)
  with jax.enable_x64(True), jax.set_mesh(mesh):
    optimizer = build_optimizer(cfg, "cpu")
    if shape == ONE:
      state = init_state(cfg, numerics64(cfg), optimizer)
    else:  # the weights of one device; zeros everywhere else
      born = init_state(cfg, numerics64(cfg), optimizer, abstract=True)
      zeros = lambda a: put(np.zeros(a.shape, a.dtype), a)
      state = dataclasses.replace(
        born,
        step=zeros(born.step),
        model=like(train_step(mode, ONE)["start"], born.model),
        opt_state=jax.tree.map(zeros, born.opt_state),
        key=jax.random.key(cfg.seed),
      )
    start = on_host(state.model)
    batch = to_global(micro_batches(random_rows(cfg, 16), 2), mesh)
    step = make_train_step(cfg, optimizer, Pretraining(cfg))
    state, metrics = step(state, batch, rules_at(cfg, 0, training=True))
    is_buffer = lambda v: isinstance(v, Buffer)
    buffers = [v for v in jax.tree.leaves(state.model, is_leaf=is_buffer) if is_buffer(v)]
    return {
      "start": start,
      "grads": {k: v / (1 - cfg.optimizer.b1) for k, v in on_host(state.opt_state[0].mu).items()},
      "buffers": on_host(buffers),
      "metrics": on_host(metrics.layers),
      "loss": {"loss": np.asarray(metrics["train/loss"])},
    }


@pytest.mark.parametrize(
  ("mode", "shape"),
  [pytest.param("dropless", (1, 2, 2, 2), marks=pytest.mark.slow), ("capacity", (2, 1, 1, 4))],
  ids=str,
)
@pytest.mark.thorough
def test_a_train_step_equals_that_of_one_device(mode, shape):
  one, many = train_step(mode, ONE), train_step(mode, shape)
  # Gradients of micro-batches are added in float32.
  assert_close(many["grads"], one["grads"], rtol=2e-5, atol=2e-7)
  assert_close(many["loss"], one["loss"], rtol=1e-6)
  assert_close(many["buffers"], one["buffers"], rtol=1e-7)
  assert_close(many["metrics"], one["metrics"], rtol=1e-6)
  for name, grad in one["grads"].items():
    assert np.abs(grad).max() > 1e-3, name
  assert any(np.abs(b).max() > 0 for b in one["buffers"].values())
