"""Moments in 8 bits on meshes: blocks do not depend on the sharding, also after a restore."""

from typing import Any

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
  thorough_but,
  tiny_config,
)

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig
from ats_jax.model.param import Param, Role
from ats_jax.orchestrator.actions import AddExpert, MergeExperts
from ats_jax.orchestrator.actions.base import carry_out
from ats_jax.sharding import blocks
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.program import make_program

SETTINGS = {
  "model.num_layers": 2,
  "model.d_model": 64,
  "model.d_ff": 96,
  "moe.num_experts": 2,
  "moe.spare_experts": 2,
  "moe.d_ff": 48,
  "moe.dense_first": 1,
  "optimizer.name": "adamw8bit",
  "optimizer.min_size": 0,
  "optimizer.grad_clip": 0.0,  # norms are sums of another order
}
# Blocks that are whole on each device, and blocks that shards cut.
BLOCKS = {"whole": 8, "cut": 40}
STEPS = 4


class Arrays(nnx.Module):
  """Stacked matrices, experts and a vector, sharded in the ways of models and along all devices."""

  def __init__(self, mesh):
    def draw(number, shape, *cut, axes, role=Role.MATRIX):
      drawn = np.float32(np.random.default_rng(number).normal(size=shape))
      return Param(
        jax.device_put(drawn, jax.NamedSharding(mesh, jax.P(*cut))), axes=axes, role=role
      )

    to, back, every = ("embed", "ff"), ("ff", "embed"), ("fsdp", "expert")
    self.up = draw(0, (2, 48, 64), None, every, "tensor", axes=to)
    self.down = draw(1, (2, 64, 48), None, "tensor", every, axes=back)
    of_experts = ("stored_experts", "expert_embed", "ff")
    self.experts = draw(
      2, (2, 4, 16, 64), None, "expert", "fsdp", "tensor", axes=of_experts, role=Role.EXPERT
    )
    self.norm = draw(3, (48,), None, axes=("norm",), role=Role.NORM)


def gradients(params: Any, step: int) -> Any:
  """Numbers that depend on the place in the whole array, sharded as parameters are."""
  rng = np.random.default_rng(step)

  def draw(p):
    drawn = rng.normal(size=p.shape) * 10.0 ** rng.uniform(-5.0, 0.0, size=p.shape)
    return jax.device_put(np.float32(drawn), p.sharding)

  return jax.tree.map(draw, params)


def run(cfg, shape, first, last, folder, restored=None):
  """Updates `first` to `last` on a mesh, which are saved; returns all arrays by name."""
  mesh = make_test_mesh(*shape)
  with jax.set_mesh(mesh):
    optimizer, params = build_optimizer(cfg, "cpu"), Arrays(mesh)
    init, update = jax.jit(optimizer.tx.init), jax.jit(optimizer.update)
    state = params, init(params)
    if restored is not None:
      like = abstract_like(jax.eval_shape(lambda p: (p, optimizer.tx.init(p)), params), mesh)
      with CheckpointManager(restored, CheckpointConfig()) as manager:
        _, state, _ = manager.restore_latest(like)
    was = {k: x.sharding for k, x in named_leaves(state).items()}
    for step in range(first, last):
      params, opt_state = state
      state = update(params, gradients(params, step), opt_state, jnp.float32(1e-2))[:2]
    assert {k: x.sharding for k, x in named_leaves(state).items()} == was
    if folder is not None:
      with CheckpointManager(folder, CheckpointConfig()) as manager:
        manager.save(last, state, {})
    return {k: np.asarray(x) for k, x in named_leaves(state).items()}


@pytest.mark.parametrize("kind", thorough_but([*BLOCKS], 1))
def test_updates_and_restores_are_those_of_one_device(kind, tmp_path):
  cfg = tiny_config(SETTINGS | {"optimizer.block_size": BLOCKS[kind]})
  one = run(cfg, (1, 1, 1), 0, STEPS, None)
  run(cfg, (1, 2, 2, 2), 0, 2, tmp_path)
  many = run(cfg, (1, 4, 1), 2, STEPS, None, restored=tmp_path)
  assert one.keys() == many.keys() and len(one) == 4 + 1 + 2 * 4 + 2 * 3
  for name, value in one.items():
    np.testing.assert_array_equal(many[name], value, err_msg=name)


@pytest.mark.parametrize("block", [8, 40, 256])
def test_no_exchange_where_blocks_are_whole(block):
  with jax.set_mesh(make_test_mesh(1, 4, 2)):
    x = jax.reshard(jnp.arange(2.0 * 64).reshape(2, 64), jax.P("tensor", "fsdp"))
    f = jax.jit(lambda x: blocks.spread(blocks.largest(x, block), x, block))
    text = f.lower(x).compile().as_text()
    assert ("all-gather" in text) == (block > 16)
    assert not any(word in text for word in ("all-reduce", "all-to-all", "collective-permute"))
    of_blocks = blocks.largest(x, block)
    assert blocks.zeros(x, block).sharding.is_equivalent_to(of_blocks.sharding, 2)
    whole = np.asarray(x)
    want = np.stack([whole[:, i : i + block].max(-1) for i in range(0, 64, block)], -1)
    np.testing.assert_array_equal(of_blocks, want)
    np.testing.assert_array_equal(f(x), np.repeat(want, block, -1)[:, :64])


@pytest.mark.thorough
def test_a_step_and_edits_on_a_mesh():
  """The types of the state stay the same, and the loss is nearly that of one device.

  Moments are sharded where weights are not.
  """
  usual = {"optimizer.block_size": BLOCKS["cut"], "orchestrator.mode": "act", "num_steps": 200}
  losses = []
  for shape, zero in (((1, 1, 1), 3), ((1, 2, 2, 2), 2)):
    cfg, mesh = tiny_config(SETTINGS | usual | {"mesh.zero": zero}), make_test_mesh(*shape)
    with on_mesh(cfg, mesh):
      program = make_program(cfg)
      state, rules = program.init(), program.training_rules(1)
      was, found = {k: v.sharding for k, v in named_leaves(state).items()}, []
      for seed in range(4):
        batch = to_global(micro_batches(random_rows(cfg, 8, seed=seed), 1), mesh)
        state, metrics = program.train_step(state, batch, rules)
        found.append(float(metrics["train/loss"]))
        assert not float(metrics["reflex/wrong"])
        if seed == 1:
          state = carry_out(AddExpert(1, 0, 1), state, cfg)
          state = carry_out(MergeExperts(1, 0, 1), state, cfg)
        assert {k: v.sharding for k, v in named_leaves(state).items()} == was
      losses.append(found)
  np.testing.assert_allclose(*losses, rtol=2e-3)
