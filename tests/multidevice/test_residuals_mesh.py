"""Positions of the residual stream cut over `tensor`: one device's values, in less memory."""

import functools
from collections import Counter
from typing import NamedTuple

import jax
import pytest
from collectives import collectives, compiled_step
from equality import ROWS, assert_equal, assert_lies_still, config_of, mesh_of, run

from ats_jax.planner.abstract import abstract_state
from ats_jax.planner.memory import activations
from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.program import make_program

CUT = {"tensor": 2, "shard_residuals": True}
CASES = [
  ("hybrid", CUT | {"fsdp": 2}),
  ("dense", CUT),
  ("dense", CUT | {"context": 2, "fsdp": 2}),
  ("dense", CUT | {"stage": 2}),
  ("latent", CUT | {"fsdp": 2}),
  ("moe", CUT | {"expert": 2}),
  ("mod", CUT | {"context": 2}),
]


@pytest.mark.parametrize(
  ("kind", "sizes"),
  [pytest.param(*c, marks=() if i == 0 else pytest.mark.mesh) for i, c in enumerate(CASES)],
  ids=str,
)
def test_a_cut_stream_computes_what_a_whole_one_does(kind, sizes):
  many = run(kind, *sizes.items())
  assert_equal(many, run(kind))  # norms and routers too, whose gradients are summed over `tensor`
  assert_lies_still(many)
