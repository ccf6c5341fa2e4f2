"""What `mesh.fsdp` shards (`mesh.zero`): moments, gradients, weights; the numbers stay the same."""

import functools
import math
from typing import NamedTuple

import jax
import pytest
from collectives import compiled_step
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config

from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.planner.memory import state_memory
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import batch_totals
from ats_jax.step.program import make_program

BASE = {
  "data.batch_size": 16,
  "optimizer.grad_clip": 0.0,
  "optimizer.eps": 1e-4,
  "optimizer.ema_decay": 0.9,
  "model.num_layers": 3,
  "step.accum_steps": 2,
}
GATE = "segments[0].layers[0].mlp.gate.weight.value"
# mesh.zero, and data, fsdp, tensor
CASES = [(2, (1, 4, 1)), (1, (1, 2, 2))]


class Shards(NamedTuple):
  """The shape on a device, by name."""

  state: dict[str, tuple[int, ...]]
  grads: dict[str, tuple[int, ...]]


@functools.cache
def shards(zero: int, shape: tuple[int, ...]) -> Shards:
  """Of the state and of gradients, from their types."""
  cfg, mesh = tiny_config(BASE | {"mesh.zero": zero}), make_test_mesh(*shape)
  on_device = lambda tree: {
    k: v.sharding.shard_shape(v.shape) for k, v in named_leaves(tree).items() if v.ndim
  }
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    rules = program.training_rules(1)
    of = lambda model, batch, key: sums_and_grads(
      program.objective, model, batch, batch_totals(batch, rules), key, rules
    )[2]
    rows = random_rows(cfg, cfg.data.batch_size)
    batch = to_global(micro_batches(rows, cfg.step.accum_steps), mesh)
    state = program.init(abstract=True)
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
def test_gradients_of_all_layers_are_never_whole_at_once_in_stage_2():
  """The loop of the backward pass writes a stack of shards; in stage 1 it is one of whole ones."""
  changes = {"mesh.zero": 2, "step.accum_steps": 1, "optimizer.ema_decay": 0.0}
  cfg, mesh = tiny_config(BASE | changes), make_test_mesh(1, 4, 1)
  with on_mesh(cfg, mesh):
    text = compiled_step(cfg, mesh).as_text()
  loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
  count = lambda shape: max(line.count(shape) for line in loops)
  weights = 2  # gate and up, which both loops read
  assert (count("f32[3,32,64]"), count("f32[3,8,64]")) == (weights, 2)
