"""Optimizers by role: who decays, and an optimizer for some roles beside another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import tiny_config

from ats_jax.model.param import Param, Role, params_of, roles
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.base import Optimizer, decays, per_parameter

MATRICES = {Role.MATRIX, Role.EXPERT}


@pytest.mark.parametrize("embeddings", [False, True])
def test_who_decays(embeddings):
  def says(role, *axes):
    return decays(Param(jnp.ones(()), axes=axes, role=role), embeddings=embeddings)

  for role in (Role.MATRIX, Role.EXPERT, Role.ROUTER, Role.HEAD, Role.ADAPTER):
    assert says(role, "embed", "ff")
    assert not says(role, "norm")  # a vector, whatever it is for
  assert says(Role.EMBEDDING, "vocab", "embed") == embeddings
  for role in (Role.NORM, Role.BIAS, Role.SINK, Role.SCALAR):
    assert not says(role) and not says(role, "heads")
    assert not says(role, "experts", "ff")  # a bias of each expert is a bias


def both(cfg, of_matrices):
  """`of_matrices` for matrices, the run's own optimizer for the rest."""
  rest = build_optimizer(cfg, "cpu")
  by_role = {role: "matrices" if role in MATRICES else "rest" for role in Role}
  labels = lambda params: jax.tree.map(by_role.get, roles(params))
  parts = {"matrices": of_matrices, "rest": rest.tx}
  return Optimizer(optax.partition(parts, labels), rest.platform)


class Few(nnx.Module):
  """Parameters of three roles."""

  def __init__(self, seed):
    draw = lambda: np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)
    self.matrix = Param(draw(), axes=("embed", "ff"), role=Role.MATRIX)
    self.router = Param(draw(), axes=("embed", "router"), role=Role.ROUTER)
    self.bias = Param(draw(), axes=("norm", "ff"), role=Role.BIAS)


def test_another_optimizer_for_matrices(mesh):
  cfg = tiny_config({"optimizer.grad_clip": 0.0})
  # Directions of descent, of unit learning rate.
  optimizer = both(cfg, optax.lion(-1.0, weight_decay=0.0))
  params, rate = Few(0), 0.01
  step = jax.jit(lambda p, g, s: optimizer.update(p, g, s, jnp.float32(rate)))
  new = step(params, Few(1), optimizer.tx.init(params))
  for old, param in zip(params_of(params), params_of(new.params), strict=True):
    moved = np.abs(np.asarray(param[...]) - np.asarray(old[...]))
    assert np.isfinite(moved).all() and moved.any(), param
    if param.role in MATRICES:  # the sign of the gradient
      np.testing.assert_allclose(moved, rate, rtol=1e-3)
  kept = per_parameter(new.opt_state)
  assert sorted(name for name, _ in kept) == ["mu", "mu", "nu"]
  of_rest = [param for name, tree in kept if name == "nu" for param in params_of(tree)]
  assert {p.role for p in of_rest if jax.tree.leaves(p)} == {Role.ROUTER, Role.BIAS}
  assert np.isfinite(float(new.update_norm))


def test_what_an_optimizer_keeps_is_found_wherever_it_is():
  params = Few(0)
  tx = optax.chain(optax.trace(0.9), optax.masked(optax.scale_by_adam(), lambda p: True))
  assert [name for name, _ in per_parameter(tx.init(params))] == ["trace", "mu", "nu"]
  assert per_parameter(optax.sgd(0.1).init(params)) == []
