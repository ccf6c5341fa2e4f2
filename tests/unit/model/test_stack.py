"""Which stack runs the layers of a config, and that stacks of the same settings are equal."""

import jax
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.model.numerics import numerics, stack_of
from ats_jax.model.pipelined import Pipeline
from ats_jax.model.stack import InOrder, Scan, Unrolled

LAYERS = {"model.num_layers": 8}
MIXED = LAYERS | {"moe.num_experts": 4, "moe.d_ff": 32, "moe.dense_first": 2}  # 2 and 6 layers


def loops(settings, unroll):
  return [type(loop) for loop in stack_of(tiny_config(settings), unroll).loops]


@pytest.mark.parametrize(
  ("settings", "unroll", "want"),
  [
    (LAYERS, 1, [Scan]),
    (LAYERS, 4, [Scan]),
    (LAYERS, 8, [Unrolled]),
    (MIXED, 1, [Scan, Scan]),
    (MIXED, 2, [Unrolled, Scan]),
    (MIXED, 8, [Unrolled, Unrolled]),
  ],
)
def test_a_segment_is_unrolled_if_it_is_short_enough(settings, unroll, want):
  assert loops(settings, unroll) == want


@pytest.mark.parametrize(
  ("rounds", "unroll", "want"), [(1, 2, Scan), (1, 4, Unrolled), (2, 2, Unrolled)]
)
def test_stages_of_the_mesh_make_a_pipeline(rounds, unroll, want):
  cfg = tiny_config(LAYERS | {"mesh.stage": 2, "mesh.stage_rounds": rounds, "step.accum_steps": 2})
  assert isinstance(stack_of(cfg, unroll), InOrder)  # without a mesh there are no stages
  with jax.set_mesh(make_test_mesh(1, 1, 1, stage=2)):
    stack = stack_of(cfg, unroll)
  assert isinstance(stack, Pipeline) and isinstance(stack.loop, want)


def test_stacks_are_equal_by_value():
  """They are static in a program: two that are not equal would compile it twice."""
  cfg = tiny_config(LAYERS)
  assert numerics(cfg) == numerics(cfg) and hash(numerics(cfg)) == hash(numerics(cfg))
  assert numerics(cfg) != numerics(tiny_config(LAYERS | {"step.remat": "full"}))
