"""Logical axes -> mesh axes, and the helpers that use them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh

from ats_jax.sharding import apply
from ats_jax.sharding.rules import MESH_AXES, RULES, spec


def test_spec_translates():
  assert spec("batch", "seq", None) == jax.P(("data", "fsdp", "expert"), None, None)
  assert spec("layers", "embed", "ff") == jax.P(None, "fsdp", "tensor")
  assert spec() == jax.P()


def test_spec_refuses_unknown_axes_and_double_use():
  with pytest.raises(ValueError, match=r"unknown logical axes \['bach'\].*knows \['act_embed'"):
    spec("bach", "seq")
  with pytest.raises(ValueError, match=re.escape("('ff', 'vocab') shard two dimensions over one")):
    spec("ff", "vocab")
  with pytest.raises(ValueError, match="two dimensions over one mesh axis"):
    spec("batch", "embed")


def test_the_table_names_only_mesh_axes():
  for axis in RULES:
    assert set(apply.mesh_axes(axis)) <= set(MESH_AXES)


def test_num_shards_multiplies_the_mesh_axes():
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    found = {a: apply.num_shards(a) for a in ("batch", "vocab", "vocab_rows", "embed", "seq")}
  assert found == {"batch": 4, "vocab": 2, "vocab_rows": 4, "embed": 2, "seq": 1}


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


def test_gather_einsum_and_reshard_put_results_where_they_are_told():
  table = np.arange(32.0, dtype=np.float32).reshape(8, 4)
  ids = np.array([[0, 7, 3], [5, 5, 1]] * 2, np.int32)
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    sharded = jax.device_put(table, spec("vocab_rows", "table_embed"))
    rows = jax.jit(lambda t: apply.gather_rows(t, ids, axes=("batch", "seq", "act_embed")))(sharded)
    assert rows.sharding.spec == spec("batch", "seq", "act_embed")
    np.testing.assert_array_equal(rows, table[ids])
    product = apply.einsum("btd,vd->btv", rows, sharded, axes=("batch", "seq", "vocab"))
    assert product.sharding.spec == spec("batch", "seq", "vocab")
    np.testing.assert_allclose(product, table[ids] @ table.T)
    assert apply.reshard(product, None, None, None).sharding.is_fully_replicated
