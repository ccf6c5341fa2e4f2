"""SOAP and SOAP-Muon against their formulas in numpy, and what is kept of a matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, tiny_config

from ats_jax.model.param import Param, Role
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.base import state_of, with_state
from ats_jax.step.optimizers.soap import SoapState

NAMES = ["soap", "soap_muon"]
LR, UPDATES, EPS = 1e-2, 200, 1e-8
BARE = {"optimizer.grad_clip": 0.0, "optimizer.weight_decay": 0.0}
MORE = [("soap", 1, 99), ("soap", 10, 6), ("soap_muon", 10, 99)]  # as below
SIDES = {"wide": (5, 8), "query": (6, 8)}  # inputs and outputs


def config(name, changes=None):
  precise = {"optimizer.iterations": 12, "optimizer.iteration_dtype": "float32"}
  more = precise if name == "soap_muon" else {}
  return tiny_config({"optimizer.name": name, **BARE, **more, **(changes or {})})


def parameters(seed):
  """A stack of two matrices, and one of three dimensions, with a spectrum as gradients have it."""
  fixed, rng = np.random.default_rng(0), np.random.default_rng(100 + seed)
  rotation = lambda n: np.linalg.qr(fixed.normal(size=(n, n)))[0] * np.geomspace(1, 0.1, n)

  def draw(*shape):
    rows, columns = shape[-2:]
    return rotation(rows) @ rng.normal(size=shape) @ rotation(columns).T

  to = functools.partial(jnp.asarray, dtype=jnp.float32)
  return {
    "wide": Param(to(draw(2, *SIDES["wide"])), axes=("embed", "ff"), role=Role.MATRIX),
    "query": Param(
      to(draw(*SIDES["query"]).reshape(6, 2, 4)),
      axes=("embed", "heads", "head_dim"),
      role=Role.MATRIX,
    ),
    "norm": Param(to(draw(5, 5)[0]), axes=("norm",), role=Role.NORM),
  }


@functools.cache
def updates(cfg, number):
  """Parameters and state before and after each of some updates by random gradients."""
  optimizer, params = build_optimizer(cfg, "cpu"), parameters(0)
  step = jax.jit(lambda p, g, s: optimizer.update(p, g, s, jnp.float32(LR))[:2])
  done = [(params, optimizer.tx.init(params))]
  for seed in range(1, number + 1):
    done.append(step(done[-1][0], parameters(seed), done[-1][1]))
  return done


def matrices(tree, name):
  """The matrices of a parameter, float64 [number, inputs, outputs]."""
  return np.asarray(tree[name][...], np.float64).reshape(-1, *SIDES[name])


def transcribed(name, every, start, bases, grads):
  """Algorithm 3 of Vyas et al. for one matrix, or pull request 278 with exact polar factors."""
  eyes = map(np.eye, start.shape)
  w, (ql, qr) = start, (eye if q is None else q for eye, q in zip(eyes, bases, strict=True))
  has_left, has_right = (q is not None for q in bases)
  b1, b2 = (0.95, 0.95) if name == "soap" else (0.95, 0.9)
  left, right = (1 - b2) * grads[0] @ grads[0].T, (1 - b2) * grads[0].T @ grads[0]
  m, v = np.zeros_like(w), np.zeros_like(w)
  polar = lambda x: functools.reduce(np.matmul, np.linalg.svd(x, full_matrices=False)[::2])
  size = 0.2 * np.sqrt(max(w.shape))
  if name == "soap_muon":
    m = (1 - b1) * grads[0]
    w = w - LR * size * polar(grads[0])
  for t, g in enumerate(grads[1:], 1):
    m = b1 * m + (1 - b1) * g
    ahead = m if name == "soap" else b1 * m + (1 - b1) * g
    inside, squared = ql.T @ ahead @ qr, ql.T @ (g if name == "soap" else ahead) @ qr
    v = b2 * v + (1 - b2) * squared**2
    if name == "soap":
      inside = inside / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + EPS)
      w = w - LR * ql @ inside @ qr.T
    else:
      w = w - LR * size * polar(ql @ (inside / (np.sqrt(v) + EPS)) @ qr.T)
    left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
    if t % every == 0:
      if has_left:
        order = np.argsort(-np.diag(ql.T @ left @ ql))
        ql, v = np.linalg.qr(left @ ql[:, order])[0], v[order]
      if has_right:
        order = np.argsort(-np.diag(qr.T @ right @ qr))
        qr, v = np.linalg.qr(right @ qr[:, order])[0], v[:, order]
  return w


@pytest.mark.parametrize(
  ("name", "every", "max_side"),
  [
    ("soap", 10, 99),
    ("soap_muon", 1, 6),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE),
  ],
)
def test_updates_follow_the_formula(name, every, max_side):
  cfg = config(name, {"optimizer.refresh_every": every, "optimizer.max_side": max_side})
  done = updates(cfg, UPDATES)
  (before, _), (_, first), (after, _) = done[0], done[1], done[-1]
  state = state_of(SoapState, first)
  for key, sides in SIDES.items():
    grads = np.stack([matrices(parameters(seed), key) for seed in range(1, UPDATES + 1)])
    bases = []
    for basis, side, length in zip(state[5:], state[3:5], sides, strict=True):
      if length > max_side:
        assert not jax.tree.leaves((basis[key], side[key]))
        bases.append([None] * grads.shape[1])
        continue
      q, p = (
        np.asarray(x[key][...], np.float64).reshape(-1, length, length) for x in (basis, side)
      )
      # The first basis, which is not unique: orthogonal, of eigenvectors, the largest in front.
      np.testing.assert_allclose(q.mT @ q, np.broadcast_to(np.eye(length), q.shape), atol=1e-5)
      inside = q.mT @ p @ q
      values = np.diagonal(inside, axis1=1, axis2=2)
      assert (np.diff(values) <= 1e-6 * values.max()).all()
      np.testing.assert_allclose(inside, values[:, None] * np.eye(length), atol=1e-6 * values.max())
      bases.append(list(q))
    for number, old in enumerate(matrices(before, key)):
      own = [of_side[number] for of_side in bases]
      want = transcribed(name, every, old, own, grads[:, number])
      moved = np.abs(want - old).max()
      assert moved > 0.1
      # Small singular values take more iterations than there are.
      atol = (1e-4 if name == "soap" else 3e-2) * moved
      np.testing.assert_allclose(matrices(after, key)[number], want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_of_a_matrix(name):
  """Its moments, and two squares for each side; no more than Adam's moments of other parameters."""
  (params, empty), (moved, _), *_ = updates(config(name, {"optimizer.max_side": 6}), 3)
  of_bytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  wide, query = 2 * 5 * 8 + 2 * 5**2, 2 * 6 * 8 + 2 * 6**2  # 8 is longer than `max_side`
  assert of_bytes(state_of(SoapState, empty)[1:]) == 4 * (2 * wide + query)
  same = [(moved[key][...] == params[key][...]).all() for key in SIDES]
  assert all(same) if name == "soap" else not any(same)  # only SOAP's first update moves none


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_zero_move_nothing(name):
  cfg = config(name, {"optimizer.refresh_every": 1})
  optimizer, params = build_optimizer(cfg, "cpu"), parameters(0)
  nothing = jax.tree.map(jnp.zeros_like, params)
  first, state = parameters(0), optimizer.tx.init(params)
  step = jax.jit(lambda p, g, s: optimizer.update(p, g, s, jnp.float32(LR))[:2])
  for _ in range(3):
    params, state = step(params, nothing, state)
  assert_trees_close(params, first, rtol=0, atol=0)
  small = jax.tree.map(lambda g: 1e-12 * g, parameters(1))  # whose squares underflow when squared
  for _ in range(3):
    params, state = step(params, small, state)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


BROKEN = {
  "mu": 1e30,
  "nu": -1e-9,
  "left": np.nan,
  "right": 1e30,
  "left_basis": 1.5,
  "right_basis": np.inf,
}


def test_a_broken_state_is_found_and_its_matrix_begins_anew():
  cfg = config("soap", {"optimizer.grad_clip": 1.0})
  optimizer, (params, state) = build_optimizer(cfg, "cpu"), updates(cfg, 3)[-1]

  @jax.jit
  def checked(state):
    directions, new = optimizer.tx.update(parameters(4), state, params)
    return optimizer.check(state, directions, new, jnp.asarray(True)), directions, new

  found, directions, new = checked(state)
  assert_trees_close(found, type(found)(directions, new, directions), rtol=0, atol=0)
  for name, value in BROKEN.items():
    healthy = state_of(SoapState, state)
    tree = jax.tree.map(jnp.copy, getattr(healthy, name))
    tree["wide"][...] = tree["wide"][...].at[1, 2, 3].set(value)
    found, *_ = checked(with_state(healthy._replace(**{name: tree}), state))
    assert not np.asarray(found.directions["wide"][...])[1].any(), name
    assert np.isnan(found.marked["wide"][...])[1].all(), name
    assert np.isfinite(found.marked["wide"][...])[0].all(), name
    anew = state_of(SoapState, found.opt_state)
    for field, kept in anew._asdict().items():
      if field != "steps":
        array = np.asarray(kept["wide"][...])[1]
        fresh = np.eye(len(array)) if "basis" in field else 0.0 * array
        np.testing.assert_array_equal(array, fresh, err_msg=name)
    np.testing.assert_array_equal(anew.mu["query"][...], state_of(SoapState, new).mu["query"][...])


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_not_edited(name):
  experts = {"moe.num_experts": 4, "moe.spare_experts": 1}
  with pytest.raises(ValueError, match=f"name={name}: its state does not follow experts"):
    config(name, experts)


def test_an_average_that_takes_nothing_in_is_refused():
  with pytest.raises(ValueError, match="basis_decay: a decay of 1"):
    config("soap_muon", {"optimizer.basis_decay": 1.0})


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_an_update_does_not_depend_on_width(name, width):
  """Of noise, as gradients of small batches are: that of SOAP is about Adam's."""
  rng = np.random.default_rng(0)
  to = lambda x: {"w": Param(jnp.asarray(x, jnp.float32), axes=("embed", "ff"), role=Role.MATRIX)}
  draw = lambda: to(1e-3 * rng.normal(size=(width, 2 * width)))
  optimizer, params = build_optimizer(config(name), "cpu"), draw()
  state, update = optimizer.tx.init(params), jax.jit(optimizer.tx.update)
  for _ in range(40):
    directions, state = update(draw(), state, params)
  rms = float(jnp.sqrt(jnp.mean(jnp.square(directions["w"][...]))))
  assert rms == pytest.approx(0.2, rel=0.15)
