"""What `mesh.fsdp` shards (`mesh.zero`): moments, gradients, weights; the numbers stay the same."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from collectives import compiled_step
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config import Config
from ats_jax.config.schema import CheckpointConfig
from ats_jax.model.layout import stacks
from ats_jax.orchestrator.actions import AddExpert
from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.planner.memory import state_memory
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import batch_totals
from ats_jax.step.program import Program, make_program

STEPS = 3
RTOL = 1e-5
BASE = {
  "data.batch_size": 16,
  "optimizer.grad_clip": 0.0,
  "optimizer.eps": 1e-4,
  "optimizer.ema_decay": 0.9,
  "model.num_layers": 3,
  "step.accum_steps": 2,
}
GATE = "segments[0].layers[0].mlp.gate.weight.value"
# mesh.zero, and data, fsdp, tensor, expert, stage, context
CASES = [(2, (1, 4, 1)), (1, (1, 2, 2))]
CUT_ROWS = 2, (1, 2, 1, 1, 1, 2)
ONE = 3, (1, 1, 1)


class Shards(NamedTuple):
  """The shape on a device, by name."""

  state: dict[str, tuple[int, ...]]
  grads: dict[str, tuple[int, ...]]


@functools.cache
def made(zero: int, shape: tuple[int, ...]) -> tuple[Program, Any]:
  """The program of a case and its mesh."""
  cfg, mesh = tiny_config(BASE | {"mesh.zero": zero}), make_test_mesh(*shape)
  with on_mesh(cfg, mesh):
    return make_program(cfg), mesh


def batches(cfg: Config, mesh: jax.sharding.Mesh, steps: range) -> list[Any]:
  rows = [random_rows(cfg, cfg.data.batch_size, seed=s) for s in steps]
  return [to_global(micro_batches(r, cfg.step.accum_steps), mesh) for r in rows]


@functools.cache
def shards(zero: int, shape: tuple[int, ...]) -> Shards:
  """Of the state and of gradients, from their types."""
  program, mesh = made(zero, shape)
  rules = program.training_rules(1)
  of = lambda model, batch, key: sums_and_grads(
    program.objective, model, batch, batch_totals(batch, rules), key, rules
  )[2]
  on_device = lambda tree: {
    k: v.sharding.shard_shape(v.shape) for k, v in named_leaves(tree).items()
  }
  with on_mesh(program.cfg, mesh):
    state, (batch,) = program.init(), batches(program.cfg, mesh, range(1))
    return Shards(on_device(state), on_device(jax.eval_shape(of, state.model, batch, state.key)))


def test_what_each_stage_shards():
  """Values are those of one device in test_train_mesh.py."""
  first, second = shards(*CASES[1]), shards(*CASES[0])
  whole, half = (3, 32, 32), (3, 16, 32)  # the width is halved by tensor
  assert first.state[f".model.{GATE}"] == first.state[f".ema.{GATE}"] == whole
  assert first.grads[f".{GATE}"] == whole
  assert {s for k, s in first.state.items() if k.startswith(".opt") and k.endswith(GATE)} == {half}
  whole, quarter = (3, 32, 64), (3, 8, 64)
  assert second.state[f".model.{GATE}"] == whole
  assert second.grads[f".{GATE}"] == quarter
  of_optimizer = {s for k, s in second.state.items() if k.startswith(".opt") and k.endswith(GATE)}
  assert of_optimizer == {quarter}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_knows_the_bytes_of_a_stage(case):
  found, (zero, (_, fsdp, tensor)) = shards(*case), case
  mesh = {"mesh.data": 1, "mesh.fsdp": fsdp, "mesh.tensor": tensor, "mesh.zero": zero}
  cfg = tiny_config(BASE | mesh)
  with on_mesh(cfg, abstract_mesh(cfg)):
    planned = state_memory(cfg, abstract_state(cfg))
  held = lambda shapes, part: sum(
    4 * math.prod(shape) for name, shape in shapes.items() if part in name
  )
  grads = held(found.grads, "")
  assert planned["weights"] == held(found.state, ".model.")
  assert planned["ema"] == held(found.state, ".ema.") == planned["weights"]
  assert planned["mu"] == planned["nu"] == held(found.state, ".mu.")
  assert planned["gradients"] == planned["gradient sums"] == grads
  assert planned["mu"] < 1.2 * planned["weights"] / fsdp  # vectors are whole
  assert grads == (planned["mu"] if zero == 2 else planned["weights"])


@pytest.mark.mesh
def test_a_checkpoint_of_one_stage_goes_on_in_another(tmp_path):
  """Stage 1, then 2 with rows that are cut, then one device: the losses of a run in one go."""
  losses, kept = [], None
  for at, case in enumerate([CASES[1], CUT_ROWS, ONE]):
    program, mesh = made(*case)
    cfg = program.cfg
    with (
      on_mesh(cfg, mesh),
      CheckpointManager(tmp_path, CheckpointConfig(), None, stacks(cfg)) as manager,
    ):
      if kept is None:
        state = program.init()
      else:
        abstract = abstract_like(program.init(abstract=True), mesh)
        step, state, _ = manager.restore_latest(abstract)
        assert step == at
        for new, old in zip(jax.tree.leaves(state), kept, strict=True):
          if not jax.dtypes.issubdtype(new.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(new), old)
      (batch,) = batches(cfg, mesh, range(at, at + 1))
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
      typed = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
      kept = [None if typed(x) else np.asarray(x) for x in jax.tree.leaves(state)]
      manager.save(at + 1, state, {})
  program, mesh = made(*ONE)
  with on_mesh(program.cfg, mesh):
    state, wanted = program.init(), []
    for batch in batches(program.cfg, mesh, range(STEPS)):
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      wanted.append(float(metrics["train/loss"]))
  assert len({*wanted}) == STEPS
  np.testing.assert_allclose(losses, wanted, RTOL)


@pytest.mark.mesh
def test_an_edited_state_is_sharded_as_before():
  cfg = tiny_config({"moe.num_experts": 4, "moe.spare_experts": 4, "moe.d_ff": 32, "mesh.zero": 2})
  mesh = make_test_mesh(1, 2, 1, 2)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    (batch,) = batches(cfg, mesh, range(1))
    state, _ = program.train_step(program.init(), batch, program.training_rules(1))
    before = {k: v.sharding for k, v in named_leaves(state).items()}
    state = AddExpert(0, 0, 7).apply(state, cfg)
    assert {k: v.sharding for k, v in named_leaves(state).items()} == before
    program.train_step(state, batch, program.training_rules(1))
    assert program.train_step._cache_size() == 1


@pytest.mark.mesh
def test_gradients_of_all_layers_are_never_whole_at_once_in_stage_2():
  """The loop of the backward pass writes a stack of shards; in stage 1 a stack of whole ones."""

  def written(zero: int) -> tuple[int, int]:
    changes = {"mesh.zero": zero, "orchestrator.mode": "off", "step.accum_steps": 1}
    cfg = tiny_config(BASE | changes | {"optimizer.ema_decay": 0.0})
    mesh = make_test_mesh(1, 4, 1)
    with on_mesh(cfg, mesh):
      text = compiled_step(cfg, mesh).as_text()
    loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    count = lambda shape: max(line.count(shape) for line in loops)
    return count("f32[3,32,64]"), count("f32[3,8,64]")

  weights = 2  # gate and up, which both loops read
  assert written(1) == (weights + 2, 0)
  assert written(2) == (weights, 2)
