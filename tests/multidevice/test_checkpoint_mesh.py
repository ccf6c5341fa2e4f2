"""Restoring onto another mesh; `test_two_processes.py` saves from several processes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ats_jax.checkpoint import CheckpointManager, abstract_like, restore_tree
from ats_jax.config.schema import CheckpointConfig

assert jax.device_count() == 8


def make_mesh(data, fsdp):
  return jax.make_mesh(
    (data, fsdp),
    ("data", "fsdp"),
    axis_types=(AxisType.Explicit,) * 2,
    devices=jax.devices()[: data * fsdp],
  )


def init():
  key = jax.random.key(7)
  return {
    "w": jax.random.normal(key, (16, 24), out_sharding=P("fsdp", "data")),
    "stack": {
      "cut": jax.random.normal(key, (3, 16, 24), out_sharding=P(None, "fsdp", "data")),
      "copied": jax.random.normal(key, (3, 1024, 128), out_sharding=P(None, "fsdp")),
    },
    "b": jax.random.normal(key, (24,), np.dtype("bfloat16"), out_sharding=P(None)),
    "keys": jax.sharding.reshard(jax.random.split(key, 8), P("fsdp")),
    "step": jax.numpy.int32(3),
  }


STACKS = {"stack": (0, 1, 2)}


def raw(x):
  typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if typed else x).tobytes()


@pytest.mark.parametrize(
  ("before", "after"), [((2, 4), (4, 2)), ((1, 1), (1, 8)), ((2, 4), (1, 1))]
)
def test_restores_onto_another_mesh_bit_for_bit(tmp_path, before, after):
  with jax.set_mesh(make_mesh(*before)):
    state = jax.jit(init)()
    with CheckpointManager(tmp_path, CheckpointConfig(), stacks=STACKS) as manager:
      manager.save(3, state, {})
  mesh = make_mesh(*after)
  with jax.set_mesh(mesh), CheckpointManager(tmp_path, CheckpointConfig(), None, STACKS) as manager:
    abstract = abstract_like(jax.eval_shape(init), mesh)
    step, restored, _ = manager.restore_latest(abstract)
    assert step == 3
    leaves = lambda tree: jax.tree.leaves(tree)
    for value, wanted, like in zip(*map(leaves, (restored, state, abstract)), strict=True):
      assert value.dtype == wanted.dtype
      assert value.sharding.is_equivalent_to(like.sharding, value.ndim)
      assert raw(value) == raw(wanted), wanted.shape
    assert restored["w"].addressable_shards[0].data.shape == (16 // after[1], 24 // after[0])
    # The types are right: a jitted step on this mesh accepts the state.
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, (s["w"], s["b"], s["step"])))(restored)
    _, w, _ = restore_tree(tmp_path, abstract["w"], subtree="w")
    assert w.sharding.is_equivalent_to(abstract["w"].sharding, 2)
