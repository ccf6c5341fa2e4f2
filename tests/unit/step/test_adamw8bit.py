"""AdamW with moments in 8 bits: its maps, its updates by plain numpy, and what it promises."""

import functools
import hashlib

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_trees_close, thorough_but, tiny_config

from ats_jax.config import from_config_dict
from ats_jax.config.presets import preset
from ats_jax.model.param import Param, Role, params_of
from ats_jax.ops import dynamic_map
from ats_jax.planner.abstract import abstract_mesh, abstract_state, resolve_without_data
from ats_jax.planner.advice import memory_savings
from ats_jax.planner.describe import describe
from ats_jax.planner.memory import state_memory
from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.adamw import AdamState, most_ratio
from ats_jax.step.optimizers.adamw8bit import (
  Adam8bitState,
  coded,
  decoded,
  from_float32,
  is_coded,
  to_float32,
)
from ats_jax.step.optimizers.base import state_of

CODES = np.arange(256, dtype=np.uint8)
SIGNED = np.asarray(dynamic_map.decode_signed(CODES))
UNSIGNED = np.asarray(dynamic_map.decode_unsigned(CODES))
# Of the tables, float32 in the order of codes: values of saved states never change.
HASHES = {
  "signed": "e69c425dec91880111f3c77501e0ad7a154d56cfed5e132afb2ece174360b1ec",
  "unsigned": "7d6739d5739f7c38ad2456e4dbeb3c4d27549224a53e4b6dba4beca93bc94f33",
}
LR = 1e-2


def published_map(*, signed: bool) -> np.ndarray:
  """`create_dynamic_map` of bitsandbytes (8 bits, 7 of exponents), in float64, sorted."""
  values = [0.0, 1.0]
  for i in range(7):
    boundaries = np.linspace(0.1, 1.0, (2**i if signed else 2 ** (i + 1)) + 1)
    means = 10.0 ** (i - 6) * (boundaries[:-1] + boundaries[1:]) / 2.0
    values += [*means, *(-means if signed else ())]
  return np.sort(values)


@pytest.mark.parametrize("name", ["signed", "unsigned"])
def test_tables_are_those_that_were_published(name):
  table = {"signed": SIGNED, "unsigned": UNSIGNED}[name]
  assert table[0] == 0.0 and table.dtype == np.float32
  assert hashlib.sha256(table.tobytes()).hexdigest() == HASHES[name]
  np.testing.assert_allclose(np.sort(table), published_map(signed=name == "signed"), rtol=2e-7)


@pytest.mark.parametrize("name", ["signed", "unsigned"])
def test_tables_are_those_of_bitsandbytes(name):
  functional = pytest.importorskip("bitsandbytes.functional")
  table = {"signed": SIGNED, "unsigned": UNSIGNED}[name]
  theirs = functional.create_dynamic_map(signed=name == "signed").numpy()
  np.testing.assert_allclose(np.sort(table), theirs, rtol=3e-7)


def test_codes_are_the_nearest():
  """Random numbers of all sizes, the middles between values, and their neighbours."""
  rng = np.random.default_rng(0)
  for table, encode, decode in (
    (SIGNED, dynamic_map.encode_signed, dynamic_map.decode_signed),
    (UNSIGNED, dynamic_map.encode_unsigned, dynamic_map.decode_unsigned),
  ):
    values = np.sort(table).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2.0
    x = 10.0 ** rng.uniform(-9.0, 0.0, 20_000) * (rng.choice([-1.0, 1.0], 20_000))
    x = np.concatenate([x, middles * (1 + 1e-6), middles * (1 - 1e-6), values, [-1.0]])
    x = np.float32(x if table is SIGNED else np.abs(x))
    got = np.asarray(decode(encode(x)))
    want = np.abs(values[np.searchsorted(middles, x)] - x)
    if table is UNSIGNED:  # what is positive stays so
      least = table[1]
      assert (got[x > 0.0] >= least).all() and (got[x == 0.0] == 0.0).all()
      got, want = got[x >= least], want[x >= least]
      x = x[x >= least]
    np.testing.assert_allclose(np.abs(got - x), want, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(encode(table), CODES)  # every code is of its value


def test_what_is_left_of_a_number_that_is_rounded_down():
  steps = UNSIGNED[1:255], UNSIGNED[2:]
  shares = 2.0 * steps[0] / (steps[0] + steps[1])
  np.testing.assert_allclose(shares.min(), dynamic_map.LEAST_SHARE, rtol=1e-6)
  np.testing.assert_allclose(SIGNED.min(), dynamic_map.LEAST, rtol=1e-6)


class Three(nnx.Module):
  """A stack of matrices whose last dimension no block divides, one small matrix, and a vector."""

  def __init__(self, seed: int = 0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    self.stack = Param(draw(2, 6, 72), axes=("embed", "ff"), role=Role.MATRIX)
    self.small = Param(draw(5, 6), axes=("embed", "ff"), role=Role.MATRIX)
    self.norm = Param(draw(72), axes=("norm",), role=Role.NORM)


def gradients(params, step):
  """Of all sizes within a block; some are 0, for ever or now and then."""
  rng = np.random.default_rng([1, step])

  def draw(x):
    number = np.arange(x.size).reshape(x.shape)
    size = 10.0 ** (-6.0 * ((number * 0.618) % 1.0))
    drawn = (rng.normal(size=x.shape) + 0.3) * size * (rng.random(x.shape) < 0.8)
    return jnp.asarray(np.where(number % 11 == 0, 0.0, drawn), jnp.float32)

  return jax.tree.map(draw, params)


def config(**settings):
  usual = {"name": "adamw8bit", "min_size": 100, "block_size": 32, "grad_clip": 0.0}
  return tiny_config({f"optimizer.{name}": value for name, value in (usual | settings).items()})


def run(cfg, steps, params=None, state=None, first=0):
  optimizer = build_optimizer(cfg, "cpu")
  params = Three() if params is None else params
  update = jax.jit(lambda p, g, s: optimizer.update(p, g, s, jnp.float32(LR))[:2])
  state = optimizer.tx.init(params) if state is None else state
  for step in range(first, first + steps):
    params, state = update(params, gradients(params, step), state)
  return params, state


class ByNumpy:
  """The update of one matrix [rows, n] by the definition, in float32."""

  def __init__(self, o, shape):
    self.o, self.steps = o, 0
    self.m, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

  def blocks(self, x):
    return [x[..., at : at + self.o.block_size] for at in range(0, x.shape[-1], self.o.block_size)]

  def nearest(self, table, x):
    values = np.sort(table)
    return values[np.searchsorted((values[1:] + values[:-1]) / 2.0, x)]

  def code(self, m, v, most):
    root = np.sqrt(v)
    size = np.where(m < 0.0, m / SIGNED.min(), m)
    scale = size.max(-1, keepdims=True)
    inverse = np.where(scale > 0.0, 1.0 / np.where(scale > 0.0, scale, 1.0), 0.0)
    m = self.nearest(SIGNED, m * inverse) * scale
    least, scale = np.abs(m) / most, np.maximum(root.max(-1, keepdims=True), scale / most)
    inverse = np.where(scale > 0.0, 1.0 / np.where(scale > 0.0, scale, 1.0), 0.0)
    share = np.maximum(root, least) * inverse
    root = np.where(share > 0.0, np.maximum(self.nearest(UNSIGNED, share), UNSIGNED[1]), 0.0)
    return m, np.square(root * scale)

  def update(self, w, g):
    o, f = self.o, np.float32
    self.steps += 1
    m = f(o.b1) * self.m + f(1 - o.b1) * g
    v = f(o.b2) * self.v + f(1 - o.b2) * g * g
    corrected = m / (1 - o.b1**self.steps), v / (1 - o.b2**self.steps)
    direction = corrected[0] / (np.sqrt(corrected[1]) + o.eps) + o.weight_decay * w
    most = most_ratio(o.b1, o.b2, jnp.dtype("float32"), jnp.dtype("float32"))
    coded = [self.code(*both, most) for both in zip(*map(self.blocks, (m, v)), strict=True)]
    self.m, self.v = (np.concatenate(part, -1).astype(f) for part in zip(*coded, strict=True))
    return (w - LR * direction).astype(f)


@pytest.mark.parametrize("betas", thorough_but([(0.9, 0.95), (0.9, 0.999), (0.95, 0.91)], 0))
def test_updates_are_those_of_the_definition(betas):
  b1, b2 = betas
  cfg = config(b1=b1, b2=b2)
  plain, weights = ByNumpy(cfg.optimizer, (2, 6, 72)), np.asarray(Three().stack[...])
  for step in range(200):
    weights = plain.update(weights, np.asarray(gradients(Three(), step).stack[...]))
  params, state = run(cfg, 200)
  moved = np.abs(weights - np.asarray(Three().stack[...])).mean()
  apart = np.abs(np.asarray(params.stack[...]) - weights)
  # A number in the middle of two values may be rounded to either; most never are.
  assert np.mean(apart > 1e-5) < 0.02 and apart.mean() < 1e-3 * moved, (apart.mean(), moved)
  state = state_of(Adam8bitState, state)
  assert state.mu.stack[...].dtype == state.nu.stack[...].dtype == jnp.uint8
  assert state.mu_scale.stack[...].shape == (2, 6, 3)
  m, v = to_float32_of(cfg, state)
  assert np.mean(np.abs(m - plain.m) > 1e-5 * np.abs(plain.m)) < 0.02
  assert np.mean(np.abs(v - plain.v) > 1e-5 * plain.v) < 0.02


def to_float32_of(cfg, state):
  found = state_of(AdamState, to_float32(cfg.optimizer, state))
  return np.asarray(found.mu.stack[...]), np.asarray(found.nu.stack[...])


def test_small_matrices_and_vectors_are_those_of_adamw():
  cfg = config()
  got, _ = run(cfg, 5)
  o = tiny_config({"optimizer.grad_clip": 0.0})
  want, _ = run(o, 5)
  for name in ("small", "norm"):
    np.testing.assert_allclose(getattr(got, name)[...], getattr(want, name)[...], rtol=1e-6)
  # The first update is that of AdamW: moments are coded after it.
  assert_trees_close(run(cfg, 1)[0], run(o, 1)[0], rtol=1e-6, atol=1e-8)


SETTINGS = {
  "b1": 0.8,
  "b2": 0.99,
  "eps": 1e-3,
  "weight_decay": 0.3,
  "grad_clip": 0.01,
  "block_size": 16,
  "min_size": 10_000,
  "rate_by_role": {"matrix": 0.5},
  "decay_by_role": {"matrix": 0.5},
  "b1_by_role": {"matrix": 0.8},
  "b2_by_role": {"matrix": 0.99},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_changes_the_update(name):
  usual, _ = _usual()
  got, _ = run(config(**{name: SETTINGS[name]}), 3)
  assert np.abs(np.asarray(got.stack[...] - usual.stack[...])).max() > 1e-6


@functools.cache
def _usual():
  return run(config(), 3)


# Moments that no gradients lead to, but rounding may: (m, v) of a block.
BOUND = most_ratio(0.9, 0.95, jnp.dtype("float32"), jnp.dtype("float32"))
HARD = {
  "second moments of 0": ([1e-3, 1.0, -1.0], [0.0, 0.0, 0.0]),
  "roots below the smallest value": ([0.9e-8, -1e-8, 1.0], [1e-16, 1e-16, 1.0]),
  "first moments that are rounded up": ([0.3e-6, -0.28e-6, 1.0], [1e-13, 0.8e-13, 1.0]),
  "a scale of the first moment beyond that of the second": ([10.0, 1e-5, 0.0], [1e-4, 1e-9, 1.0]),
  "of all sizes": (np.logspace(-12, 0, 60), np.logspace(-24, 0, 60)),
  "zeros": ([0.0, 0.0], [0.0, 0.0]),
  "numbers that are too small": ([1e-35, -1e-35], [1e-38, 0.0]),
}


@jax.jit
def _there_and_back(m, v):
  kept = coded(m, v, BOUND, 256)
  return kept, decoded(kept, 256)


@pytest.mark.parametrize("case", HARD)
def test_first_moments_stay_within_a_bound_of_second_ones(case):
  fill = lambda x: np.float32([*x, *[0.0] * (60 - len(x))])
  m, v = map(fill, HARD[case])
  kept, (got_m, got_v) = jax.tree.map(np.asarray, _there_and_back(m, v))
  assert np.isfinite(got_m).all() and np.isfinite(got_v).all()
  # Rounding to float32 is on top of it.
  most = BOUND / dynamic_map.LEAST_SHARE * (1 + 1e-5)
  assert (np.abs(got_m) <= most * np.sqrt(got_v)).all()
  assert ((kept.nu > 0) | (kept.mu == 0)).all() and not kept.mu[m == 0.0].any()
  # What needs no raising is the nearest, or the smallest positive value.
  share = np.sqrt(v) / np.maximum(kept.nu_scale, 1e-30)
  fits = (np.abs(got_m) <= BOUND * np.sqrt(v)) & (kept.nu_scale > 0.0) & (v > 0.0)
  nearest = np.abs(share[:, None] - UNSIGNED[1:]).min(-1)
  np.testing.assert_allclose(np.abs(UNSIGNED[kept.nu] - share)[fits], nearest[fits], atol=1e-7)


def test_updates_stay_short_where_gradients_vanish():
  """One number of a block has a gradient at times: what is left of its moments is rounded."""
  cfg = config(block_size=256, weight_decay=0.0)
  optimizer, params = build_optimizer(cfg, "cpu"), Three()
  update = jax.jit(lambda g, s: optimizer.tx.update(g, s, params))
  state, longest, rng = optimizer.tx.init(params), 0.0, np.random.default_rng(0)
  for step in range(300):
    sizes = np.full((2, 6, 72), 1e-9 if step % 60 else 1e-4)
    sizes[..., 0] = 1.0
    grads = jax.tree.map(jnp.zeros_like, params)
    grads.stack[...] = jnp.asarray(sizes * rng.normal(size=sizes.shape), jnp.float32)
    directions, state = update(grads, state)
    longest = max(longest, float(jnp.max(jnp.abs(directions.stack[...]))))
  # The bound of Adam itself is about 1.2, but for the corrections of the first updates.
  assert longest < 2.5


def test_directions_are_nearly_those_of_float32():
  """Of the same gradients, in length and direction: rounding neither adds up nor has a bias."""
  rng = np.random.default_rng(0)
  params, scales = Three(), np.exp(rng.normal(size=72))
  plain = tiny_config({"optimizer.grad_clip": 0.0, "optimizer.weight_decay": 0.0})
  both = [config(block_size=256, weight_decay=0.0), plain]
  both = [build_optimizer(cfg, "cpu").tx for cfg in both]
  of_both = lambda g, states: [both[i].update(g, states[i], params) for i in range(2)]
  update = jax.jit(of_both)
  states, sums = [tx.init(params) for tx in both], np.zeros((2, 2, 6, 72))
  for _ in range(150):
    grads = jax.tree.map(jnp.zeros_like, params)
    grads.stack[...] = jnp.asarray((rng.normal(size=(2, 6, 72)) + 0.1) * scales, jnp.float32)
    moved, states = zip(*update(grads, states), strict=True)
    directions = np.stack([np.float64(m.stack[...]) for m in moved])
    sums += directions
  for got, want in (directions, sums):
    cosine = np.sum(got * want) / np.linalg.norm(got) / np.linalg.norm(want)
    assert cosine > 0.998 and abs(np.linalg.norm(got) / np.linalg.norm(want) - 1.0) < 0.01


def test_conversion_from_and_to_float32():
  cfg, plain = config(), tiny_config({"optimizer.grad_clip": 0.0})
  o = cfg.optimizer
  _, exact = run(plain, 30)
  ours = from_float32(o, exact)
  assert jax.tree.structure(ours) == jax.tree.structure(run(cfg, 0)[1])
  got, want = state_of(AdamState, to_float32(o, ours)), state_of(AdamState, exact)
  assert int(got.steps) == int(want.steps) == 30
  np.testing.assert_array_equal(got.mu.norm[...], want.mu.norm[...])
  m, v = (np.asarray(x.stack[...]) for x in (want.mu, want.nu))
  for name, error in (("mu", np.abs(got.mu.stack[...] - m)), ("nu", np.abs(got.nu.stack[...] - v))):
    scale = np.repeat(getattr(state_of(Adam8bitState, ours), f"{name}_scale").stack[...], 32, -1)
    scale = scale[..., :72]
    # Half a cell of the highest decade, which is 0.9 / 64 and 0.9 / 128 of the scale wide.
    if name == "mu":
      assert (error <= 0.00704 * scale).all()
    else:
      assert (np.abs(np.sqrt(got.nu.stack[...]) - np.sqrt(v)) <= 0.00352 * scale).all()
  # Codes become numbers and the same codes; scales may be rounded.
  again = from_float32(o, to_float32(o, ours))
  assert_trees_close(again, ours, rtol=3e-7, atol=0.0)
  # And a run goes on from either.
  params, state = run(cfg, 30, None, ours, first=30)
  assert int(state_of(Adam8bitState, state).steps) == 60
  run(plain, 1, params, to_float32(o, state))


@functools.cache
def _check(cfg):
  return jax.jit(build_optimizer(cfg, "cpu").check)


def check(cfg, state, *, armed):
  directions = jax.tree.map(jnp.ones_like, Three())
  return _check(cfg)(state, directions, state, jnp.asarray(armed))


@functools.cache
def _after_20():
  return run(config(), 20)[1]


def changed(state, field, value):
  """With another number in the first block of the stack."""
  adam = state_of(Adam8bitState, state)
  tree = jax.tree.map(lambda x: x, getattr(adam, field))
  tree.stack[...] = tree.stack[...].at[0, 0, 0].set(value)
  return jax.tree.map(
    lambda s: adam._replace(**{field: tree}) if s is adam else s,
    state,
    is_leaf=lambda s: s is adam,
  )


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("mu_scale", np.nan),
    ("mu_scale", -1.0),
    ("mu_scale", 1e20),
    ("nu_scale", np.inf),
    ("nu_scale", -1.0),
    ("nu_scale", 1e-20),
  ],
)
def test_scales_that_no_gradients_lead_to_are_found(field, value):
  cfg, state = config(), _after_20()
  found = check(cfg, state, armed=True)
  assert_trees_close(found.opt_state, state, rtol=0, atol=0)  # nothing is wrong
  assert not np.isnan(found.marked.stack[...]).any()
  wrong = changed(state, field, value)
  found = check(cfg, wrong, armed=True)
  marks = np.isnan(found.marked.stack[...])
  assert marks[0, 0, :32].sum() > 20 and marks.sum() == marks[0, 0, :32].sum()
  mended = state_of(Adam8bitState, found.opt_state)
  m, v = to_float32_of(cfg, found.opt_state)
  assert np.isfinite(m).all() and np.isfinite(v).all()
  assert not np.asarray(mended.mu.stack[...])[marks].any()
  assert not np.asarray(found.directions.stack[...])[marks].any()
  unarmed = check(cfg, wrong, armed=False)
  assert_trees_close(unarmed.opt_state, wrong, rtol=0, atol=0)
  assert (np.isnan(unarmed.marked.stack[...]) == marks).all()


def test_another_b2_leaves_moments_within_its_bound():
  _, state = run(config(b2=0.999), 20)
  new = config(b2=0.9)
  refit = build_optimizer(new, "cpu").refit
  again = refit(state)
  assert not np.isnan(check(new, again, armed=True).marked.stack[...]).any()
  m, v = to_float32_of(new, again)
  most = most_ratio(0.9, 0.9, jnp.dtype("float32"), jnp.dtype("float32"))
  assert (np.abs(m) <= most / dynamic_map.LEAST_SHARE * np.sqrt(v) * (1 + 1e-5)).all()
  assert_trees_close(refit(again), again, rtol=3e-7, atol=0.0)


def test_which_parameters_are_coded(mesh):
  o = config().optimizer
  param = lambda shape, role, *axes: Param(jnp.zeros(shape), axes=axes, role=role)
  assert is_coded(o, param((10, 10), Role.MATRIX, "embed", "ff"))
  assert is_coded(o, param((3, 10, 10), Role.MATRIX, "embed", "ff"))
  assert is_coded(o, param((3, 2, 10, 10), Role.EXPERT, "stored_experts", "expert_embed", "ff"))
  assert not is_coded(o, param((9, 10, 9), Role.MATRIX, "embed", "ff"))  # of each layer 90
  assert not is_coded(o, param((3, 2, 9, 10), Role.EXPERT, "stored_experts", "expert_embed", "ff"))
  assert not is_coded(o, param((3, 500), Role.MATRIX, "ff"))
  for role in (Role.EMBEDDING, Role.HEAD, Role.ROUTER, Role.NORM, Role.BIAS):
    assert not is_coded(o, param((50, 50), role, "embed", "ff"))


@pytest.mark.thorough
def test_a_loss_is_nearly_that_of_adamw():
  """And the reflex, which checks the moments of every step, finds nothing."""
  losses = {}
  for name in ("adamw", "adamw8bit"):
    settings = {"optimizer.name": name} | canonical.STEERED
    if name == "adamw8bit":
      settings |= {"optimizer.min_size": 256}
    cfg = canonical.config("dense", settings)
    state, found, rng = canonical.state(cfg), [], np.random.default_rng(0)
    for _ in range(100):
      state, metrics = canonical.step(cfg, state, canonical.text_rows(cfg, rng))
      found.append(float(metrics["train/loss"]))
      assert not float(metrics["reflex/wrong"])
    losses[name] = np.array(found)
  drop = losses["adamw"][:5].mean() - losses["adamw"][-20:].mean()
  apart = losses["adamw8bit"][-20:].mean() - losses["adamw"][-20:].mean()
  assert drop > 0.5 and abs(apart) < 1e-3 * drop, (drop, apart)


def test_moments_of_8b_parameters_take_two_bytes_each():
  """But for embedding, norms and head."""
  settings = preset("llama_7b")
  settings.optimizer.name = "adamw8bit"
  cfg = resolve_without_data(from_config_dict(settings))
  with on_mesh(cfg, abstract_mesh(cfg, 1)):
    state = abstract_state(cfg)
    parts = state_memory(cfg, state)
  assert 8.02e9 < sum(p.size for p in params_of(state.model)) < 8.04e9
  fields = cfg.optimizer.formats()
  assert 22e9 < sum(parts[name] for name in fields) <= 23e9
  of_role = {}
  kept = state_of(Adam8bitState, state.opt_state)
  for param, codes in zip(params_of(state.model), params_of(kept.mu), strict=True):
    of_role.setdefault(param.role, set()).add(str(codes.dtype))
  in_float32 = {role: {"float32"} for role in (Role.EMBEDDING, Role.HEAD, Role.NORM)}
  assert of_role == {Role.MATRIX: {"uint8"}} | in_float32


def test_a_plan_names_formats_and_advises_what_there_is():
  cfg = tiny_config({"optimizer.name": "adamw8bit", "model.vocab_size": 259})
  plan = describe(cfg, 1)
  assert plan["run"]["formats"].items() >= cfg.optimizer.formats().items()
  assert "moments uint8 and float32;" in canonical.program(cfg).facts()["formats"]
  advice = [name for saving in memory_savings(cfg, 1, plan) for name in saving.settings]
  assert advice and not any(name.startswith("optimizer.") for name in advice)
