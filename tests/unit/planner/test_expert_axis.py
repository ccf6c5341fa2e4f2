"""The planner on the expert axis: what the exchange of tokens takes, and whether it is needed."""

import functools

import pytest
from helpers import tiny_config
from in_process import printed_by

from ats_jax.planner.describe import describe
from ats_jax.planner.expert_axis import render_expert_axis, without_expert_axis

EXPERTS = {
  "model.vocab_size": 384,
  "model.d_model": 64,
  "moe.num_experts": 8,
  "moe.top_k": 1,
  "data.seq_len": 64,
  "data.batch_size": 16,
  "mesh.expert": 8,
}


@functools.cache
def described(**changes):
  settings = {name.replace("__", "."): value for name, value in changes.items()}
  return describe(tiny_config(EXPERTS | settings))


def activations(**changes):
  return described(**changes)["device_bytes_estimated"]["activations"]


@pytest.mark.thorough
def test_activations_grow_with_the_room_and_not_with_the_devices():
  """Of two layers: each further row of room is kept as input, gate, up, product and output."""
  at = lambda factor: activations(moe__exchange__factor=factor)
  rows = 2 * 64  # of a device: rows of text x tokens, one choice each
  a_row = 4 * 5 * 64
  more = (at(2.0) - at(1.0)) / (2 * rows)
  # Places and tiles take some more.
  assert a_row <= more < 1.3 * a_row
  assert at(8.0) - at(1.0) > 6.5 * (at(2.0) - at(1.0))  # room for the worst case


@pytest.mark.thorough
def test_activations_of_two_steps_have_the_room_of_both():
  """With room for all: what a host received from both hosts is kept beside the rows of experts."""
  room = {"moe__exchange__factor": 8.0}
  two_steps = {"moe__exchange": "hierarchical", "moe__exchange__hosts": 2}
  more = activations(**room, **two_steps) - activations(**room)
  rows = 2 * 2 * 64  # of a device: from two hosts, 2 rows of 64 tokens
  assert 2 * 4 * 64 * rows <= more < 3 * 2 * 4 * 64 * rows  # of each of two layers


def test_no_axis_is_preferred_where_it_takes_no_more():
  flags = ("--config.mesh.expert=4", "--config.moe.exchange.factor=4.0")
  small = ("--config.model.num_layers=1", "--config.model.d_model=64", "--devices=4")
  text = printed_by("plan", "--config=configs/debug.py:moe", *flags, *small)
  assert "without an expert axis: prefer mesh.fsdp=4, mesh.expert=1.\n" in text


def test_a_mesh_without_the_axis_has_nothing_to_compare():
  dense = tiny_config({"model.vocab_size": 384})
  assert without_expert_axis(dense, 0, describe(dense)) is None


def test_where_it_takes_more_the_user_decides():
  found = {"mesh.fsdp": 4, "bytes": 3 << 30, "bytes_with": 2 << 30, "prefer": False}
  assert "takes 3.000 GiB a device, 1.000 more than this mesh" in render_expert_axis(found)[0]
