"""Logical axes -> mesh axes, and the helpers that use them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.planner.abstract import abstract_mesh
from ats_jax.sharding import apply
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.rules import (
  MESH_AXES,
  RULES,
  ZERO_AXES,
  current_plan,
  current_rules,
  spec,
  use_plan,
  whole_rows,
)


def test_spec_translates():
  assert spec("batch", "seq", None) == jax.P(("data", "fsdp", "expert"), "context", None)
  assert spec("layers", "embed", "ff") == jax.P("stage", ZERO_AXES, "tensor")
  assert spec() == jax.P()


def test_spec_refuses_unknown_axes_and_double_use():
  with pytest.raises(ValueError, match=r"unknown logical axes \['bach'\].*knows \['act_embed'"):
    spec("bach", "seq")
  with pytest.raises(ValueError, match=re.escape("('ff', 'vocab') shard two dimensions over one")):
    spec("ff", "vocab")
  with pytest.raises(ValueError, match="two dimensions over one mesh axis"):
    spec("batch", "embed")


@pytest.mark.parametrize("plan", RULES)
def test_the_tables_name_the_same_axes_and_only_mesh_axes(plan):
  with use_plan(plan):
    assert dict(current_rules()) == dict(RULES[plan])
    for axis in RULES[plan]:
      assert set(apply.mesh_axes(axis)) <= set(MESH_AXES)
  assert RULES[plan].keys() == RULES["default"].keys()
  assert dict(current_rules()) == dict(RULES["default"])


@pytest.mark.parametrize("plan", RULES)
def test_experts_are_cut_or_dealt_out_whole(plan):
  sharded = RULES[plan]["embed"]
  assert sharded == (ZERO_AXES if plan == "default" else None)
  with use_plan(plan):
    others = ("fsdp", "context") if sharded else None
    assert spec("stored_experts", "expert_embed", "ff") == jax.P("expert", others, "tensor")
  with use_plan(plan, whole_matrices=True):
    experts = ("expert", "fsdp", "context") if sharded else "expert"
    assert spec("stored_experts", "expert_embed", "ff") == jax.P(experts, None, "tensor")
    assert spec("experts", None) == jax.P("expert", None)


@pytest.mark.parametrize(
  ("experts", "spare", "whole"), [(4, 0, True), (3, 1, True), (3, 0, False), (0, 0, True)]
)
def test_whole_experts_are_dealt_out_where_their_number_divides(experts, spare, whole):
  changes = {"mesh.fsdp": 2, "mesh.expert": 2} if experts != 3 or spare else {"mesh.fsdp": 2}
  cfg = tiny_config({"moe.num_experts": experts, "moe.spare_experts": spare} | changes)
  with on_mesh(cfg, abstract_mesh(cfg)):
    assert current_plan().whole_matrices == whole


def test_a_plan_that_is_none():
  with pytest.raises(ValueError, match=r"no sharding plan 'zero4'.*'data_parallel', 'default'"):
    use_plan("zero4")


def test_a_function_is_traced_anew_for_each_plan():
  weight = jax.jit(lambda: jnp.zeros((8, 8), out_sharding=spec("embed", None)))
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    first = weight().sharding.spec
    with use_plan("data_parallel"):
      assert weight().sharding.spec == jax.P(None, None)
    assert weight().sharding.spec == first == jax.P(ZERO_AXES, None)


@pytest.mark.parametrize("plan", RULES)
def test_a_plan_may_leave_rows_whole(plan):
  weights = ("layers", "embed", "vocab", "ff")
  with use_plan(plan, whole_vocabulary=True):
    cut = [current_rules()[axis] for axis in weights]
    with whole_rows():
      assert spec("batch", "seq", "heads_of_rows") == jax.P(spec("batch")[0], None, "tensor")
      assert [current_rules()[axis] for axis in weights] == cut
    assert spec("seq", "heads") == jax.P("context", "tensor")


def test_num_shards_multiplies_the_mesh_axes():
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    found = {a: apply.num_shards(a) for a in ("batch", "vocab", "embed", "seq")}
  assert found == {"batch": 4, "vocab": 2, "embed": 2, "seq": 1}


@pytest.mark.compat
def test_an_island_sees_blocks_and_can_reduce_over_a_logical_axis():
  def local(x):
    assert x.shape == (2, 6)
    index = jnp.full((1, 1), apply.axis_index("batch"))
    return apply.all_sum(jnp.sum(x), "batch"), apply.all_max(jnp.max(x), "batch"), index

  x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    out_axes = ((), (), ("batch", None))
    f = apply.island(local, in_axes=[("batch", None)], out_axes=out_axes)
    total, largest, index = f(x)  # not sharded yet: an island moves its arguments
  np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
  assert largest == x.max()
  assert np.asarray(index).ravel().tolist() == [0, 1, 2, 3]


def test_einsum_and_reshard_put_results_where_they_are_told():
  table = np.arange(32.0, dtype=np.float32).reshape(8, 4)
  ids = np.array([[0, 7, 3], [5, 5, 1]] * 2, np.int32)
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    sharded = jax.device_put(table, spec("vocab", "embed"))
    rows = jax.device_put(table[ids], spec("batch", "seq", "act_embed"))
    whole = apply.reshard(sharded, "vocab", "act_embed")
    product = apply.einsum("btd,vd->btv", rows, whole, axes=("batch", "seq", "vocab"))
    assert product.sharding.spec == spec("batch", "seq", "vocab")
    np.testing.assert_allclose(product, table[ids] @ table.T)
    assert apply.reshard(product, None, None, None).sharding.is_fully_replicated
