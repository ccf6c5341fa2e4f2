"""The planner on the expert axis: whether the exchange of tokens is needed."""

import pytest
from helpers import tiny_config
from in_process import printed_by

from ats_jax.planner.expert_axis import render_expert_axis, without_expert_axis


@pytest.mark.thorough
def test_no_axis_is_preferred_where_it_takes_no_more():
  flags = ("--config.mesh.expert=4", "--config.moe.exchange.factor=4.0", "--devices=4")
  small = ("--config.model.num_layers=1", "--config.model.d_model=64", "--config.step.remat=full")
  text = printed_by("plan", "--config=configs/debug.py:moe", *flags, *small)
  assert "without an expert axis: prefer mesh.fsdp=4, mesh.expert=1.\n" in text


def test_the_user_decides_where_it_takes_more():
  found = {"mesh.fsdp": 4, "bytes": 3 << 30, "bytes_with": 2 << 30, "prefer": False}
  assert "takes 3.000 GiB a device, 1.000 more than this mesh" in render_expert_axis(found)[0]
  prefer = render_expert_axis(found | {"bytes": 1 << 30, "prefer": True})
  assert prefer[0] == "experts fit without an expert axis: prefer mesh.fsdp=4, mesh.expert=1."
  assert "1.000 GiB a device, 1.000 less than this mesh" in prefer[1]
  assert without_expert_axis(tiny_config(), 0, {}) is None  # no axis, nothing to compare
