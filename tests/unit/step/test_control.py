"""What the supervisor can set between two steps: its effect, neutrality, and no new program."""

import dataclasses
import functools

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_decoder, make_test_mesh, named_leaves

from ats_jax.model.router import CLOSED
from ats_jax.step.parts.sparse import drop_experts
from lab.faults.inject import Fault, with_faults

STEERED = canonical.STEERED
EXPERTS = {"moe.num_experts": 6, "moe.spare_experts": 2, "moe.router_bias": True}


def with_control(state, **values):
  arrays = {name: jnp.float32(value) for name, value in values.items()}
  return dataclasses.replace(state, control=state.control._replace(**arrays))


@functools.cache
def hybrid():
  """Six experts and two idle slots in each of two layers, of which the second skips tokens."""
  cfg = canonical.config("hybrid", STEERED | EXPERTS | {"step.accum_steps": 2})
  return with_faults(canonical.program(cfg))


def step(program, state, number, gradient=1.0):
  fault = Fault(jnp.float32(gradient), jnp.float32(1.0))
  batch = canonical.rows(program.cfg, seed=number)
  return program.train_step(state, batch, program.training_rules(1), fault=fault)


def routers(state):
  return [layer.mlp.router for blocks in state.model.segments for layer in blocks.layers]


def arrays(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.thorough
def test_dropped_experts_get_no_token(mesh):
  program = hybrid()
  cfg = program.cfg
  state = with_control(canonical.state(cfg), expert_dropout=0.5)
  idle = []
  for number in range(12):
    state, metrics = step(program, state, number)
    load_LE = np.asarray(metrics.layers["moe/load"])
    np.testing.assert_allclose(load_LE.sum(axis=1), 1.0, rtol=1e-5)
    used = (load_LE > 0).sum(axis=1)
    assert (used >= cfg.moe.top_k).all()
    idle.append(cfg.moe.num_experts - used)
  assert np.mean(idle) > 1.0 and len({tuple(i) for i in idle}) > 1  # another draw in each step
  assert np.isfinite(metrics.values).all() and all(
    np.abs(router.bias_E[...]).max() < 10.0 for router in routers(state)
  )
  state, metrics = step(program, with_control(state, expert_dropout=0.0), 12)
  assert (np.asarray(metrics.layers["moe/load"]) > 0).sum() == cfg.moe.num_experts * 2
  assert program.train_step._cache_size() == 1


@pytest.mark.thorough
def test_no_optimizer_touches_a_buffer(mesh):
  """Weight decay neither; the load is what the step saw, and what it reports."""
  program, state = hybrid(), canonical.state(hybrid().cfg)
  names = ("active_S", "side_S", "direction_SD", "penalty_S")
  for router in routers(state):
    for name in names[1:]:
      getattr(router, name)[...] = 0.0 * getattr(router, name)[...] + 0.05
  before = [{n: np.array(getattr(r, n)[...]) for n in (*names, "load_E")} for r in routers(state)]
  moments = [name for name in named_leaves(state.opt_state) if ".router" in name]
  assert moments and all(".weight" in name or ".offset" in name for name in moments)
  state, metrics = step(program, state, 0)
  for router, was in zip(routers(state), before, strict=True):
    for name in names:
      np.testing.assert_array_equal(getattr(router, name)[...], was[name], err_msg=name)
    assert np.abs(router.load_E[...] - was["load_E"]).max() > 1e-3
  load_LE = np.concatenate([router.load_E[...] for router in routers(state)])
  np.testing.assert_allclose(load_LE, metrics.layers["moe/load"], rtol=1e-6)
  violation = load_LE.max() * program.cfg.moe.num_experts - 1
  np.testing.assert_allclose(metrics["moe/max_violation"], violation, rtol=1e-5)
  biases = [np.abs(router.bias_E[...]).max() for router in routers(state)]
  np.testing.assert_allclose(metrics["moe/max_bias"], max(biases), rtol=1e-6)


def test_enough_experts_stay_whatever_the_rate(mesh):
  changes = {"moe.num_experts": 9, "moe.num_groups": 3, "moe.top_groups": 2, "moe.spare_experts": 3}
  cfg = canonical.config("experts", STEERED | changes)

  @jax.jit
  def run(key):
    dropped = drop_experts(cfg, make_decoder(cfg), jnp.float32(1.0), key)
    (router,) = (layer.mlp.router for layer in dropped.segments[0].layers)
    return router.bias_E[...], router.is_open()

  bias_LE, is_open_LE = run(jax.random.key(0))
  stays = (np.asarray(bias_LE) > CLOSED / 2) * np.asarray(is_open_LE)
  assert (stays.sum(axis=-1) == 6).all()


@pytest.mark.thorough
def test_all_devices_drop_the_same_experts():
  cfg = canonical.config("experts", STEERED | {"moe.num_experts": 8})

  @jax.jit
  def drop(key):
    dropped = drop_experts(cfg, make_decoder(cfg), jnp.float32(0.4), key)
    return dropped.segments[0].layers[0].mlp.router.bias_E[...]

  found = []
  for shape in ((1, 1, 1, 1), (2, 1, 2, 2)):
    with jax.set_mesh(make_test_mesh(*shape)):
      found.append(np.asarray(drop(jax.random.key(1))) > CLOSED / 2)
  np.testing.assert_array_equal(*found)
  assert not found[0].all() and found[0].any()


@pytest.mark.thorough
def test_a_step_that_is_left_out_leaves_the_buffers_of_routers_alone(mesh):
  program = hybrid()
  state, _ = step(program, canonical.state(program.cfg), 0)
  before = arrays((state.model, state.opt_state))
  state, metrics = step(program, state, 1, gradient=np.nan)
  assert metrics["reflex/skipped"] == 1.0
  for a, b in zip(arrays((state.model, state.opt_state)), before, strict=True):
    np.testing.assert_array_equal(a, b)
