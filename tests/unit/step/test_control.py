"""What the supervisor can set between two steps: its effect, neutrality, and no new program."""

import dataclasses
import functools

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_decoder, make_test_mesh

from ats_jax.model.router import CLOSED
from ats_jax.step.optimizers.base import decay_mask
from ats_jax.step.parts.sparse import drop_experts
from lab.faults.inject import Fault, with_faults

STEERED = canonical.STEERED
EXPERTS = {"moe.num_experts": 6}
GROUPS = {"moe.num_groups": 3, "moe.top_groups": 2, "moe.spare_experts": 3}


def with_control(state, **values):
  arrays = {name: jnp.float32(value) for name, value in values.items()}
  return dataclasses.replace(state, control=state.control._replace(**arrays))


@functools.cache
def hybrid():
  """Six experts in each of two layers, the second of which skips tokens; two micro-batches."""
  cfg = canonical.config("hybrid", STEERED | EXPERTS | {"step.accum_steps": 2})
  return with_faults(canonical.program(cfg))


def step(program, state, number, gradient=1.0):
  fault = Fault(jnp.float32(gradient), jnp.float32(1.0))
  batch = canonical.rows(program.cfg, seed=number)
  return program.train_step(state, batch, program.training_rules(1), fault=fault)


def arrays(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_weight_decay_is_multiplied_and_only_where_there_is_any(mesh):
  cfg = canonical.config("dense", STEERED | {"optimizer.weight_decay": 0.5})
  before, rows = canonical.state(cfg), canonical.rows(cfg)
  moved = [
    canonical.step(cfg, with_control(canonical.state(cfg), decay_scale=scale), rows)[0]
    for scale in (1.0, 3.0, 0.0)
  ]
  assert canonical.program(cfg).train_step._cache_size() == 1
  rate = 1e-3  # no warm-up
  decays = jax.tree.leaves(decay_mask(before.model, embeddings=False))
  for decay, old, once, thrice, never in zip(
    decays, *(arrays(s.model) for s in (before, *moved)), strict=True
  ):
    off = rate * 0.5 * old if decay else np.zeros_like(old)
    np.testing.assert_allclose(never - once, off, rtol=1e-3, atol=3e-7)
    np.testing.assert_allclose(once - thrice, 2 * off, rtol=1e-3, atol=3e-7)
  for a, b in zip(arrays(moved[0].opt_state), arrays(moved[1].opt_state), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_dropped_experts_get_no_token(mesh):
  program = hybrid()
  cfg = program.cfg
  state = with_control(canonical.state(cfg), expert_dropout=0.5)
  bias = lambda s: [np.asarray(layer.mlp.router.bias_E[...])
                    for blocks in s.model.segments for layer in blocks.layers]  # fmt: skip
  idle = []
  for number in range(12):
    state, metrics = step(program, state, number)
    load_LE = np.asarray(metrics.layers["moe/load"])
    np.testing.assert_allclose(load_LE.sum(axis=1), 1.0, rtol=1e-5)
    used = (load_LE > 0).sum(axis=1)
    assert (used >= cfg.moe.top_k).all()
    idle.append(cfg.moe.num_experts - used)
  assert np.mean(idle) > 1.0 and len({tuple(i) for i in idle}) > 1  # another draw in each step
  assert np.isfinite(metrics.values).all() and max(np.abs(b).max() for b in bias(state)) < 10.0
  state, metrics = step(program, with_control(state, expert_dropout=0.0), 12)
  assert (np.asarray(metrics.layers["moe/load"]) > 0).sum() == cfg.moe.num_experts * 2
  assert program.train_step._cache_size() == 1


@pytest.mark.parametrize(("changes", "kept"), [({}, 3), (GROUPS | {"moe.num_experts": 9}, 6)])
def test_enough_experts_stay_whatever_the_rate(mesh, changes, kept):
  cfg = canonical.config("experts", STEERED | EXPERTS | changes)
  model = canonical.model(cfg)
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
  program = hybrid()
  initial = lambda: canonical.state(program.cfg)
  state, _ = step(program, with_control(initial(), decay_scale=0.5, expert_dropout=0.5), 0)
  undone = with_control(state, decay_scale=1.0, expert_dropout=0.0)
  fresh = dataclasses.replace(canonical.copied(undone), control=initial().control)
  (got, _), (want, _) = step(program, undone, 1), step(program, fresh, 1)
  for a, b in zip(arrays(got.model), arrays(want.model), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_all_devices_drop_the_same_experts():
  cfg = canonical.config("experts", STEERED | {"moe.num_experts": 8})
  drop = jax.jit(lambda model, key: drop_experts(cfg, model, jnp.float32(0.4), key))
  found = []
  for shape in ((1, 1, 1, 1), (2, 1, 2, 2)):
    with jax.set_mesh(make_test_mesh(*shape)):
      dropped = drop(make_decoder(cfg), jax.random.key(1))
      found.append(np.asarray(dropped.segments[0].layers[0].mlp.router.bias_E[...]) > CLOSED / 2)
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
