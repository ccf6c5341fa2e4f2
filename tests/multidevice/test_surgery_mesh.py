"""Surgery on a mesh with an expert axis: the result of one device, shardings as they were."""

from typing import NamedTuple

import numpy as np
import pytest
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config

from ats_jax.config import Config
from ats_jax.orchestrator.actions import (
  AddExpert,
  MergeExperts,
  PruneExpert,
  RecycleExpert,
  SetPenalty,
)
from ats_jax.orchestrator.actions.expert_view import view_experts
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.program import make_program

BASE = {
  "moe.num_experts": 4,
  "moe.spare_experts": 4,
  "moe.d_ff": 32,
  "moe.null_experts": 1,
  "moe.router_bias": True,
  "optimizer.ema_decay": 0.9,
}
# Slots 0 to 3 and 4 to 7 are on different devices: copies go to another one, and stay.
EDITS = (
  AddExpert(0, 0, 7),
  AddExpert(0, 4, 5),
  SetPenalty(0, 5, 3.0),
  MergeExperts(1, 0, 4),
  RecycleExpert(1, 2),
  PruneExpert(0, 6),
)


class Run(NamedTuple):
  edited: dict[str, np.ndarray]  # the state right after the edits
  twins: list[list[int]]
  loss: float  # of a step with it


def run(cfg: Config, shape: tuple[int, int, int, int]) -> Run:
  """A step, all edits, and another step, which finds a state of the same types."""
  mesh = make_test_mesh(*shape)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    batch = to_global(micro_batches(random_rows(cfg, 8), 1), mesh)
    shardings = lambda tree: {k: v.sharding for k, v in named_leaves(tree).items()}
    state, _ = program.train_step(program.init(), batch, program.training_rules(1))
    before = shardings(state)
    for edit in EDITS:
      state = edit.apply(state, cfg)
    assert shardings(state) == before
    parts = named_leaves((state.model, state.ema, state.opt_state))
    edited = {name: np.array(x) for name, x in parts.items()}
    twins = [view_experts(cfg, state, layer).twin.tolist() for layer in (0, 1)]
    state, metrics = program.train_step(state, batch, program.training_rules(1))
    assert shardings(state) == before and program.train_step._cache_size() == 1
    return Run(edited, twins, float(metrics["train/loss"]))


@pytest.mark.thorough
def test_edits_on_a_mesh_are_those_of_one_device():
  """Where weights are whole and moments sharded."""
  one = run(tiny_config(BASE), (1, 1, 1, 1))
  many = run(tiny_config(BASE | {"mesh.zero": 2}), (1, 2, 2, 2))
  assert many.twins == one.twins == [[7, -1, -1, -1, 5, 4, -1, 0], [2, -1, 0, -1, -1, -1, -1, -1]]
  assert one.edited.keys() == many.edited.keys()
  for name, value in one.edited.items():
    # The step before rounded differently; Adam makes a share of lr = 1e-2 of it.
    np.testing.assert_allclose(many.edited[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
  np.testing.assert_allclose(many.loss, one.loss, rtol=1e-4)
