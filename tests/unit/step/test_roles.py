"""Optimizers by role: who decays, and an optimizer for some roles beside another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_decoder, tiny_config

from ats_jax.model.param import Param, Role, params_of, roles, trainable
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.base import Optimizer, decays, per_parameter

MOE = {"moe.num_experts": 4, "moe.top_k": 2, "moe.router_bias": True, "model.qk_norm": True}
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
  return Optimizer(optax.partition(parts, labels), rest.platform, squares=rest.squares)


def test_another_optimizer_for_matrices(mesh):
  cfg = tiny_config(MOE | {"optimizer.grad_clip": 0.0})
  # Directions of descent, of unit learning rate.
  optimizer = both(cfg, optax.lion(-1.0, weight_decay=0.0))
  params = trainable(make_decoder(cfg))
  draw = lambda p: jax.random.normal(jax.random.key(1), p.shape)
  opt_state = optimizer.tx.init(params)
  rate = 0.01
  step = jax.jit(lambda p, g, s: optimizer.update(p, g, s, jnp.float32(rate)))
  new = step(params, jax.tree.map(draw, params), opt_state)
  for old, param in zip(params_of(params), params_of(new.params), strict=True):
    moved = np.abs(np.asarray(param[...]) - np.asarray(old[...]))
    assert np.all(np.isfinite(moved)) and np.any(moved), param
    if param.role in MATRICES:  # the sign of the gradient
      np.testing.assert_allclose(moved, rate, rtol=1e-3)
  kept = per_parameter(new.opt_state)
  of_rest = [t for n, t in kept if n == "nu"]
  assert {p.role for t in of_rest for p in params_of(t) if jax.tree.leaves(p)} == {
    Role.ROUTER, Role.EMBEDDING, Role.HEAD, Role.NORM, Role.BIAS
  }  # fmt: skip
  assert sorted(n for n, _ in kept) == ["mu", "mu", "nu"]
  assert np.isfinite(float(new.update_norm))


def test_what_an_optimizer_keeps_is_found_wherever_it_is(mesh):
  model = trainable(make_decoder(tiny_config()))
  tx = optax.chain(optax.trace(0.9), optax.masked(optax.scale_by_adam(), lambda p: True))
  names = [name for name, _ in per_parameter(tx.init(model))]
  assert names == ["trace", "mu", "nu"]
  assert per_parameter(optax.sgd(0.1).init(model)) == []
