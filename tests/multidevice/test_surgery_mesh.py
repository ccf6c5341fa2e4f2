"""Surgery on a mesh with an expert axis: the result of one device, shardings as they were."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config

from ats_jax.orchestrator.actions import (
  AddExpert,
  MergeExperts,
  PruneExpert,
  RecycleExpert,
  ReopenExpert,
  SetPenalty,
)
from ats_jax.orchestrator.actions.expert_view import view_experts
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program

pytestmark = pytest.mark.thorough

CFG = tiny_config(
  {
    "moe.num_experts": 4,
    "moe.spare_experts": 4,
    "moe.d_ff": 32,
    "moe.null_experts": 1,
    "moe.router_bias": True,
    "optimizer.ema_decay": 0.9,
  }
)
ONE, MANY = (1, 1, 1, 1), (1, 2, 2, 2)  # data, fsdp, tensor, expert


class Run(NamedTuple):
  cut: dict[str, np.ndarray]  # the state right after the edits
  losses: np.ndarray
  twins: list[int]
  shardings: list[dict[str, Any]]  # before, after the edits, after another step
  compilations: int


@functools.cache
def run(shape: tuple[int, int, int, int]) -> Run:
  mesh = make_test_mesh(*shape)
  with jax.set_mesh(mesh):
    program = make_program(CFG)
    batch = to_global(micro_batches(random_rows(CFG, 8), 1), mesh)
    shardings = lambda tree: {k: v.sharding for k, v in named_leaves(tree).items()}
    state, first = program.train_step(program.init(), batch, program.training_rules(1))
    found = [shardings(state)]
    # Slots 0 to 3 and 4 to 7 are on different devices: copies go to another one, and stay.
    state = AddExpert(0, 0, 7).apply(state, CFG)
    state = AddExpert(0, 4, 5).apply(state, CFG)
    state = SetPenalty(0, 5, 3.0).apply(state, CFG)
    state = AddExpert(1, 6, 1).apply(state, CFG)
    state = MergeExperts(1, 0, 4).apply(state, CFG)
    state = RecycleExpert(1, 2).apply(state, CFG)
    state = PruneExpert(0, 6).apply(state, CFG)
    state = ReopenExpert(0, 6).apply(state, CFG)
    found.append(shardings(state))
    cut = {
      k: np.array(v) for k, v in named_leaves((state.model, state.ema, state.opt_state)).items()
    }
    twins = [view_experts(CFG, state, layer).twin.tolist() for layer in (0, 1)]
    losses = [float(first.values[0])]
    for _ in range(3):
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
    found.append(shardings(state))
    return Run(cut, np.array(losses), twins, found, program.train_step._cache_size())


def test_the_result_is_that_of_one_device():
  one, many = run(ONE), run(MANY)
  assert many.twins == one.twins == [[7, -1, -1, -1, 5, 4, -1, 0], [2, 6, 0, -1, -1, -1, 1, -1]]
  assert one.cut.keys() == many.cut.keys()
  for name, value in one.cut.items():
    # The step before rounded differently; Adam makes a share of lr = 1e-2 of it.
    np.testing.assert_allclose(many.cut[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
  np.testing.assert_allclose(many.losses, one.losses, rtol=1e-4)


@pytest.mark.parametrize("shape", [ONE, MANY])
def test_shardings_stay_and_the_step_is_compiled_once(shape):
  result = run(shape)
  before, cut, after = result.shardings
  assert before == cut == after
  assert result.compilations == 1
