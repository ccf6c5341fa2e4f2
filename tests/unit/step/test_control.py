"""What the supervisor can set between two steps: its effect, neutrality, and no new program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_decoder, make_test_mesh, micro_batches, random_rows, tiny_config

from ats_jax.model.router import CLOSED
from ats_jax.sharding.mesh import to_global
from ats_jax.step.optimizers.base import decay_mask
from ats_jax.step.parts.sparse import drop_experts
from ats_jax.step.program import make_program
from lab.faults.inject import Fault, with_faults

CALM = {
  "optimizer.learning_rate": 1e-3,
  "optimizer.schedule": "constant",
  "orchestrator.mode": "act",
  "orchestrator.check_interval": 10,
}
EXPERTS = {"moe.num_experts": 6, "moe.d_ff": 16, "moe.top_k": 2}
GROUPS = {"moe.num_groups": 3, "moe.top_groups": 2, "moe.spare_experts": 3}


def with_control(state, **values):
  arrays = {name: jnp.float32(value) for name, value in values.items()}
  return dataclasses.replace(state, control=state.control._replace(**arrays))


def batch(cfg, step):
  return micro_batches(random_rows(cfg, 8, seed=step), cfg.step.accum_steps)


def arrays(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_weight_decay_is_multiplied_and_only_where_there_is_any(mesh):
  cfg = tiny_config(CALM | {"optimizer.weight_decay": 0.5})
  program, state = make_program(cfg), make_program(cfg).init()
  copies = [jax.tree.map(jnp.copy, state) for _ in range(3)]
  moved = []
  for copy, scale in zip(copies, (1.0, 3.0, 0.0), strict=True):
    moved.append(
      program.train_step(
        with_control(copy, decay_scale=scale), batch(cfg, 0), program.training_rules(1)
      )[0]
    )
  assert program.train_step._cache_size() == 1
  rate = 1e-3  # no warm-up
  decays = jax.tree.leaves(decay_mask(state.model, embeddings=False))
  for decay, before, once, thrice, never in zip(
    decays, *(arrays(s.model) for s in (state, *moved)), strict=True
  ):
    off = rate * 0.5 * before if decay else np.zeros_like(before)
    np.testing.assert_allclose(never - once, off, rtol=1e-3, atol=3e-7)
    np.testing.assert_allclose(once - thrice, 2 * off, rtol=1e-3, atol=3e-7)
  for a, b in zip(arrays(moved[0].opt_state), arrays(moved[1].opt_state), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_dropped_experts_get_no_token(mesh):
  cfg = tiny_config(CALM | EXPERTS | {"step.accum_steps": 2})
  program = make_program(cfg)
  state = with_control(program.init(), expert_dropout=0.5)
  bias = lambda s: [np.asarray(layer.mlp.router.bias_E[...])
                    for blocks in s.model.segments for layer in blocks.layers]  # fmt: skip
  idle = []
  for step in range(12):
    state, metrics = program.train_step(state, batch(cfg, step), program.training_rules(1))
    load_LE = np.asarray(metrics.layers["moe/load"])
    np.testing.assert_allclose(load_LE.sum(axis=1), 1.0, rtol=1e-5)
    used = (load_LE > 0).sum(axis=1)
    assert (used >= cfg.moe.top_k).all()
    idle.append(cfg.moe.num_experts - used)
  assert np.mean(idle) > 1.0 and len({tuple(i) for i in idle}) > 1  # another draw in each step
  assert np.isfinite(metrics.values).all() and max(np.abs(b).max() for b in bias(state)) < 10.0
  state, metrics = program.train_step(
    with_control(state, expert_dropout=0.0), batch(cfg, 12), program.training_rules(1)
  )
  assert (np.asarray(metrics.layers["moe/load"]) > 0).sum() == cfg.moe.num_experts * 2
  assert program.train_step._cache_size() == 1


@pytest.mark.parametrize(("changes", "kept"), [({}, 3), (GROUPS | {"moe.num_experts": 9}, 6)])
def test_enough_experts_stay_whatever_the_rate(mesh, changes, kept):
  cfg = tiny_config(CALM | EXPERTS | changes)
  model = make_decoder(cfg)
  dropped = drop_experts(cfg, model, jnp.float32(1.0), jax.random.key(0))
  for blocks, were in zip(dropped.segments, model.segments, strict=True):
    for layer, was in zip(blocks.layers, were.layers, strict=True):
      router = layer.mlp.router
      stays = (router.bias_E[...] > CLOSED / 2) * router.is_open()
      assert (stays.sum(axis=-1) == kept).all()
      assert (was.mlp.router.bias_E[...] == 0.0).all()  # the model itself is not changed


@pytest.mark.thorough
def test_neutral_again_after_an_undo(mesh):
  """What follows an undo is the step of a run that was never touched, from the same state."""
  cfg = tiny_config(CALM | EXPERTS)
  program = make_program(cfg)
  set_to = with_control(program.init(), decay_scale=0.5, expert_dropout=0.5)
  state, _ = program.train_step(set_to, batch(cfg, 0), program.training_rules(1))
  undone = with_control(state, decay_scale=1.0, expert_dropout=0.0)
  fresh = dataclasses.replace(
    jax.tree.map(jnp.copy, undone), control=jax.tree.map(jnp.copy, program.init().control)
  )
  got, _ = program.train_step(undone, batch(cfg, 1), program.training_rules(1))
  want, _ = program.train_step(fresh, batch(cfg, 1), program.training_rules(1))
  for a, b in zip(arrays(got.model), arrays(want.model), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_all_devices_drop_the_same_experts():
  cfg = tiny_config(CALM | EXPERTS | {"moe.num_experts": 8, "model.num_layers": 1})
  loads = []
  for shape in ((1, 1, 1, 1), (2, 1, 2, 2)):
    mesh = make_test_mesh(*shape)
    with jax.set_mesh(mesh):
      program = make_program(cfg)
      state = with_control(program.init(), expert_dropout=0.4)
      _, metrics = program.train_step(
        state, to_global(batch(cfg, 0), mesh), program.training_rules(1)
      )
      loads.append(np.asarray(metrics.layers["moe/load"]))
  np.testing.assert_allclose(*loads, atol=1e-6)
  assert (loads[0] == 0).any()


@pytest.mark.thorough
def test_a_step_that_is_left_out_leaves_the_buffers_of_routers_alone(mesh):
  depth = {"mod.routing": "learned", "mod.capacity": 0.5, "mod.every": 1}
  cfg = tiny_config(CALM | EXPERTS | depth | {"model.num_layers": 1})
  program = make_program(cfg)
  state, _ = program.train_step(program.init(), batch(cfg, 0), program.training_rules(1))
  before = arrays((state.model, state.opt_state))
  broken = Fault(jnp.float32(np.nan), jnp.float32(1.0))
  step, rules = with_faults(program).train_step, program.training_rules(1)
  state, metrics = step(state, batch(cfg, 1), rules, fault=broken)
  assert metrics["reflex/skipped"] == 1.0
  for a, b in zip(arrays((state.model, state.opt_state)), before, strict=True):
    np.testing.assert_array_equal(a, b)
