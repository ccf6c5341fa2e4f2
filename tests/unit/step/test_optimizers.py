"""Optimizers by name: their formulas, what each setting changes, which weights are used."""

import dataclasses
import functools
import re

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_trees_close, assert_trees_equal, tiny_config
from optax import contrib

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig
from ats_jax.config.schema.optimizer import (
  OPTIMIZERS,
  ROLES,
  OptimizerConfig,
  Orthogonalised,
)
from ats_jax.model.layout import stacks
from ats_jax.model.param import Param, Role, trainable
from ats_jax.ops.newton_schulz import of_unit_norm, orthogonalise
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.base import state_of
from ats_jax.step.optimizers.muon import MuonState

LR, UPDATES = 1e-2, 200
# Without what all have, so that a formula is that of one optimizer alone.
BARE = {"optimizer.grad_clip": 0.0, "optimizer.weight_decay": 0.0}
NEEDS = {"schedule_free": {"optimizer.schedule": "constant"}}
BUILT_IN = [name for name in OPTIMIZERS if OPTIMIZERS[name] is not OptimizerConfig]


class Few(nnx.Module):
  """Parameters of several roles, stacked and not: matrices in both directions, one of 3 dims."""

  def __init__(self, seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    self.wide = Param(draw(3, 8, 24), axes=("embed", "ff"), role=Role.MATRIX)
    axes = ("heads", "head_dim", "embed")
    self.out = Param(draw(3, 2, 8, 6), axes=axes, role=Role.MATRIX, num_inputs=2)
    axes = ("stored_experts", "expert_embed", "ff")
    self.experts = Param(draw(3, 4, 8, 8), axes=axes, role=Role.EXPERT)
    self.router = Param(draw(3, 8, 4), axes=("embed", "router"), role=Role.ROUTER)
    self.norm = Param(draw(3, 8), axes=("norm",), role=Role.NORM)
    self.embed = Param(draw(16, 8), axes=("vocab", "embed"), role=Role.EMBEDDING)


def config(name, changes=None):
  of_optimizer = {"optimizer.name": name, **NEEDS.get(name, {}), **(changes or {})}
  return tiny_config({"moe.num_experts": 4, **of_optimizer})


def trained(cfg, updates=UPDATES, *, grows=False):
  """Parameters and state after updates by random gradients."""
  optimizer, params = build_optimizer(cfg, "cpu"), Few(0)
  step = jax.jit(lambda p, g, s, lr: optimizer.update(p, g, s, lr)[:2])
  state = optimizer.tx.init(params)
  for seed in range(1, updates + 1):
    grads, lr = Few(seed), LR
    if grows:  # gradients through the norm at which they are clipped
      grads, lr = jax.tree.map(functools.partial(jnp.multiply, 0.01 * seed), grads), seed * LR
    params, state = step(params, grads, state, jnp.float32(lr))
  return params, state


def by_optax(tx, updates=UPDATES):
  params = Few(0)
  state = tx.init(params)
  step = jax.jit(lambda p, g, s: tx.update(g, s, p))
  for seed in range(1, updates + 1):
    moves, state = step(params, Few(seed), state)
    params = optax.apply_updates(params, moves)
  return params, state


@pytest.mark.parametrize(
  ("name", "changes", "reference"),
  [
    ("lion", {"optimizer.b1": 0.8}, optax.lion(LR, 0.8, 0.99, weight_decay=0.0)),
    (
      "schedule_free",
      {"optimizer.b1": 0.8, "optimizer.b2": 0.9},
      contrib.schedule_free_adamw(LR, b1=0.8, b2=0.9),
    ),
    (
      "optax",
      {"optimizer.factory": "optax.adabelief", "optimizer.arguments": {"b1": 0.5}},
      optax.adabelief(LR, b1=0.5),
    ),
    (
      "optax",
      {"optimizer.factory": "optax.scale_by_yogi"},
      optax.chain(optax.scale_by_yogi(), optax.scale(-LR)),
    ),
  ],
)
def test_equals_that_of_optax(name, changes, reference):
  got, _ = trained(config(name, BARE | changes))
  want, _ = by_optax(reference)
  assert_trees_close(got, want, rtol=1e-4, atol=2e-5)


def test_adafactor_equals_that_of_optax_for_each_tensor_of_a_stack():
  cfg = config("adafactor", BARE | {"optimizer.least_factored": 4, "optimizer.momentum": 0.5})
  got, _ = trained(cfg, 20)
  of_optax = optax.adafactor(
    LR, 4, momentum=0.5, multiply_by_parameter_scale=False, weight_decay_rate=None
  )
  stacked = Few(0).experts
  for layer in range(3):
    for expert in range(4):
      param, state = stacked[...][layer, expert], None
      state = of_optax.init(param)
      for seed in range(1, 21):
        move, state = of_optax.update(Few(seed).experts[...][layer, expert], state, param)
        param = param + move
      np.testing.assert_allclose(got.experts[...][layer, expert], param, rtol=1e-4, atol=1e-5)


def exact_polar(matrix):
  """`U V^T` by a singular value decomposition."""
  u, _, v = np.linalg.svd(matrix, full_matrices=False)
  return u @ v


@pytest.mark.parametrize("name", ["muon", "muonh"])
def test_muon_follows_its_formula(name):
  """Momentum, its polar factor by singular values, and the size of the update, in numpy."""
  precise = {"optimizer.iterations": 12, "optimizer.iteration_dtype": "float32"}
  got, _ = trained(config(name, BARE | precise), 60)
  sides = {"wide": (8, 24), "out": (16, 6), "experts": (8, 8)}
  for attribute, (rows, columns) in sides.items():
    old = np.asarray(getattr(Few(0), attribute)[...], np.float64)
    shape, w = old.shape, old.reshape(-1, rows, columns)
    m, norms = np.zeros_like(w), np.linalg.norm(w, axis=(1, 2), keepdims=True)
    for seed in range(1, 61):
      g = np.asarray(getattr(Few(seed), attribute)[...], np.float64).reshape(w.shape)
      m = 0.95 * m + 0.05 * g
      direction = np.stack([exact_polar(x) for x in 0.95 * m + 0.05 * g])
      if name == "muon":
        w = w - LR * 0.2 * np.sqrt(max(rows, columns)) * direction
      else:
        w = w - LR * norms * direction / np.linalg.norm(direction, axis=(1, 2), keepdims=True)
        w *= norms / np.linalg.norm(w, axis=(1, 2), keepdims=True)
    result = np.asarray(getattr(got, attribute)[...]).reshape(w.shape)
    moved = np.abs(w - old.reshape(w.shape)).max()
    assert moved > 0.1
    # A momentum of nearly the rank of its matrix has small singular values, which take longer.
    np.testing.assert_allclose(result, w, rtol=0, atol=2e-2 * moved, err_msg=attribute)
    assert result.reshape(shape).shape == getattr(got, attribute).shape
  adam, _ = trained(config("adamw", BARE), 60)
  for rest in ("norm", "embed"):
    np.testing.assert_array_equal(getattr(got, rest)[...], getattr(adam, rest)[...])


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (32, 48), (24, 96), (96, 24)])
@pytest.mark.parametrize(
  ("dtype", "steps", "least", "most"),
  [("float32", 6, 0.99, 1.01), ("float16", 5, 0.8, 1.13), ("bfloat16", 5, 0.6, 1.15)],
)
def test_singular_values_become_one(rows, columns, dtype, steps, least, most):
  rng, few = np.random.default_rng(0), min(rows, columns)
  draw = lambda *sides: np.linalg.qr(rng.normal(size=(3, *sides)))[0]
  values = np.geomspace(1e-2, 1.0, few)
  x = jnp.asarray(draw(rows, few) * values @ draw(columns, few).mT, jnp.float32)
  unit = of_unit_norm(x.at[2].set(0.0), 1, eps=1e-7, dtype=jnp.dtype(dtype))
  y = np.asarray(orthogonalise(unit, steps=steps), np.float32)
  values = np.linalg.svd(y[:2], compute_uv=False)
  assert least < values.min() and values.max() < most
  assert not y[2].any()  # a gradient of zeros moves nothing
  if dtype == "float32":
    np.testing.assert_allclose(y[0], exact_polar(np.asarray(x[0])), atol=1e-2)


@pytest.mark.parametrize("width", [16, 64, 256])
@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_the_size_of_an_update_does_not_depend_on_width_nor_on_clipping(width, clip):
  """Gradients are clipped, and not what they are orthogonalised to."""
  rng = np.random.default_rng(0)
  draw = lambda: jnp.asarray(rng.normal(size=(2, width, 2 * width)), jnp.float32)
  params = {"w": Param(draw(), axes=("embed", "ff"), role=Role.MATRIX)}
  grads = {"w": Param(1e3 * draw(), axes=("embed", "ff"), role=Role.MATRIX)}
  cfg = config("muon", BARE | {"optimizer.grad_clip": clip})
  optimizer = build_optimizer(cfg, "cpu")
  directions, _ = optimizer.tx.update(grads, optimizer.tx.init(params), params)
  rms = float(jnp.sqrt(jnp.mean(jnp.square(directions["w"][...]))))
  assert rms == pytest.approx(cfg.optimizer.update_rms, rel=0.15)


def other(name, setting, field):
  """A legal value of a setting that is not its default."""
  default = getattr(OPTIMIZERS[name](), setting)
  if setting.endswith("_by_role"):
    return dict.fromkeys(("matrix", "embedding"), 0.98 if setting.startswith("b2") else 0.5)
  special = {
    "matrix_roles": ("embedding",),
    "factory": "optax.lion",
    "arguments": {"b1": 0.1},
    "least_factored": 4,
    "block_size": 8,
    "min_size": 10_000,
    "iterations": 2,
    "b2": 0.98,
    "eps": 0.5,
    "norm_eps": 0.5,
    "clip_rms": 0.1,
    "refresh_every": 1,
    "max_side": 8,
  }
  if setting in special:
    return special[setting]
  if choices := field.metadata["choices"]:
    return next(choice for choice in choices if choice != default)
  return not default if isinstance(default, bool) else default / 2 or 0.5


def settings_that_move():
  """Settings of every optimizer that change its update, but those that all have."""
  for name in BUILT_IN:
    common = {f.name for f in dataclasses.fields(OptimizerConfig)} - {
      "weight_decay", "decay_embeddings", "rate_by_role", "decay_by_role", "grad_clip",
    }  # fmt: skip
    for field in dataclasses.fields(OPTIMIZERS[name]):
      if field.name not in common:
        yield name, field


LONG = [pytest.param(n, marks=() if n == "muon" else pytest.mark.thorough) for n in BUILT_IN]


@pytest.mark.parametrize("name", LONG)
def test_every_setting_changes_the_update(name):
  quick = {"optimizer.iterations": 1} if issubclass(OPTIMIZERS[name], Orthogonalised) else {}
  quick |= {"optimizer.min_size": 16} if name == "adamw8bit" else {}  # of small matrices too
  base = trained(config(name, quick), 3, grows=True)
  for owner, field in settings_that_move():
    if owner != name:
      continue
    changes = {f"optimizer.{field.name}": other(name, field.name, field)}
    changed = trained(config(name, quick | changes), 3, grows=True)
    of = lambda done: [np.asarray(x, np.float32) for x in jax.tree.leaves(done)]
    pairs = list(zip(of(base), of(changed), strict=False))
    assert any(a.shape != b.shape or (a != b).any() for a, b in pairs), changes
    assert all(np.isfinite(b).all() for _, b in pairs), changes


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_roles_have_rates_and_decays_of_their_own(name):
  plain, _ = trained(config(name), 1)
  tables = {
    "rate_by_role": {"embedding": 0.25, "expert": 2.0},
    "decay_by_role": {"norm": 0.5, "matrix": 0.0},
  }
  got, _ = trained(config(name, {f"optimizer.{k}": v for k, v in tables.items()}), 1)
  before, decay = Few(0), config(name).optimizer.weight_decay
  moved = lambda after, name: np.asarray(getattr(after, name)[...] - getattr(before, name)[...])
  np.testing.assert_allclose(moved(got, "embed"), 0.25 * moved(plain, "embed"), atol=1e-6)
  np.testing.assert_allclose(moved(got, "experts"), 2 * moved(plain, "experts"), atol=1e-6)
  off = LR * np.asarray(before.norm[...])
  np.testing.assert_allclose(moved(got, "norm"), moved(plain, "norm") - 0.5 * off, atol=1e-6)
  off = LR * decay * np.asarray(before.wide[...])
  np.testing.assert_allclose(moved(got, "wide"), moved(plain, "wide") + off, atol=1e-6)


def test_matrices_of_muonh_keep_their_norm_and_the_rest_decays():
  tables = {"rate_by_role": {"expert": 3.0}, "decay_by_role": {"matrix": 0.5, "norm": 0.5}}
  changes = {f"optimizer.{name}": table for name, table in tables.items()}
  got, _ = trained(config("muonh", changes), 20)
  plain, _ = trained(config("muonh", {"optimizer.rate_by_role": {"expert": 3.0}}), 20)
  for name, number in {"wide": 3, "out": 3, "experts": 12}.items():
    norms = [
      np.linalg.norm(getattr(few, name)[...].reshape(number, -1), axis=1) for few in (got, Few(0))
    ]
    np.testing.assert_allclose(*norms, rtol=1e-5)
  np.testing.assert_array_equal(got.wide[...], plain.wide[...])
  assert np.abs(np.asarray(got.norm[...])).sum() < np.abs(np.asarray(plain.norm[...])).sum()


def test_roles_of_settings_are_those_of_parameters():
  assert set(ROLES) == {role.name.lower() for role in Role} - {"buffer"}


def test_weights_of_schedule_free_are_its_average():
  """Evaluation, checkpoints and exports take `state.weights`: the paper's x, not its y."""
  cfg = canonical.config("dense", {"optimizer.name": "schedule_free", **NEEDS["schedule_free"]})
  state = canonical.state(cfg)
  for seed in range(3):
    state, _ = canonical.step(cfg, state, canonical.rows(cfg, seed))
  inner = state_of(contrib.ScheduleFreeState, state.opt_state)
  y, b1 = trainable(state.model), cfg.optimizer.b1
  x = jax.tree.map(lambda y, z: (y - (1 - b1) * z) / b1, y, inner.z)
  assert_trees_close(trainable(state.weights), x, rtol=1e-5, atol=1e-6)
  assert cfg.optimizer.has_average
  moved = jax.tree.map(lambda y, x: jnp.abs(y - x).max(), y, trainable(state.weights))
  assert max(jax.tree.leaves(moved)) > 1e-6


# The second of matrices of which one side has a basis.
IN_CHECKPOINTS = {name: {} for name in BUILT_IN} | {"soap": {"optimizer.max_side": 32}}


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=() if n == "soap" else pytest.mark.thorough) for n in BUILT_IN]
)
def test_a_run_goes_on_bit_for_bit(name, tmp_path):
  """After a checkpoint, with all that the optimizer keeps and the averages of weights."""
  settings = {"optimizer.name": name, **NEEDS.get(name, {}), **IN_CHECKPOINTS[name]}
  cfg = canonical.config("experts", settings)
  step = lambda state, seed: canonical.step(cfg, state, canonical.rows(cfg, seed))[0]
  state = step(step(canonical.state(cfg), 0), 1)
  with CheckpointManager(tmp_path, CheckpointConfig(), stacks=stacks(cfg)) as manager:
    manager.save(2, state, {})
    found = manager.restore_latest(abstract_like(canonical.state(cfg), canonical.mesh()))
  assert found is not None
  kept = lambda state: (state.model, state.opt_state, state.ema)
  assert_trees_equal(kept(step(found[1], 2)), kept(step(state, 2)))


@pytest.mark.parametrize("name", ["muon", "muonh"])
def test_a_broken_momentum_is_found_and_its_matrix_does_not_move(name):
  cfg = config(name, {"optimizer.grad_clip": 1.0})
  optimizer, params = build_optimizer(cfg, "cpu"), Few(0)
  state = optimizer.tx.init(params)
  grads = Few(1)

  def update(state, armed):
    tx = optax.with_extra_args_support(optimizer.tx)
    directions, new = tx.update(grads, state, params, learning_rate=LR)
    return optimizer.check(state, directions, new, jnp.asarray(armed)), directions

  checked, directions = update(state, True)
  assert_trees_close(checked.directions, directions, rtol=0, atol=0)  # of a healthy one nothing
  momentum = state_of(MuonState, state).momentum
  momentum.wide[...] = momentum.wide[...].at[1, 2, 3].set(1e30)
  checked, _ = update(state, True)
  assert not np.asarray(checked.directions.wide[...][1]).any()
  assert np.isnan(np.asarray(checked.marked.wide[...][1])).all()
  for layer in (0, 2):
    assert np.isfinite(np.asarray(checked.marked.wide[...][layer])).all()
  assert float(state_of(MuonState, checked.opt_state).momentum.wide[...][1, 2, 3]) == 0.0


def refused(values):
  with pytest.raises(ValueError) as found:
    build_optimizer(tiny_config(values), "cpu")
  return str(found.value)


@pytest.mark.parametrize(
  ("values", "words"),
  [
    ({"optimizer.name": "mun"}, "Did you mean 'muon'"),
    ({"optimizer.name": "lion", "optimizer.eps": 1e-6}, "optimizer.eps is a setting of"),
    ({"optimizer.rate_by_role": {"embeding": 0.5}}, "no role 'embeding'.*Did you mean 'embedding'"),
    ({"optimizer.name": "muon", "optimizer.matrix_roles": ("expertt",)}, "no role 'expertt'"),
    ({"optimizer.name": "schedule_free"}, "Set optimizer.schedule=constant"),
    ({"optimizer.name": "optax", "optimizer.factory": "optax.adm"}, "optax has no adm"),
    ({"optimizer.name": "optax", "optimizer.factory": "no_such.x"}, "no_such cannot be imported"),
    (
      {"optimizer.name": "optax", "optimizer.arguments": {"beta": 1.0}},
      "unexpected keyword argument 'beta'.*It takes learning_rate, b1",
    ),
  ],
)
def test_what_cannot_be_is_refused_in_one_line(values, words):
  message = refused(values)
  assert re.search(words, message) and "\n" not in message
