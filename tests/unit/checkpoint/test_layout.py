import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import make_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ats_jax.checkpoint import layout


def test_names_do_not_depend_on_python_classes():
  state = make_state(0)
  names = list(layout.named_leaves(state))
  assert "model/embed" in names and "model/layers/1/kernel" in names
  assert "opt_state/1/0/mu/layers/0/bias" in names
  assert not any("value" in n for n in names)
  model_names = list(layout.named_leaves(state["model"], "model"))
  assert model_names == [n for n in names if n.startswith("model/")]


def test_a_leaf_that_is_no_array_is_refused_by_name():
  with pytest.raises(ValueError, match=r"'model/rate' is a float \(0.5\).*`extra`"):
    layout.named_leaves({"model": {"rate": 0.5}})


@pytest.mark.parametrize(
  "tree",
  [{"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)}, {"a": jnp.zeros(1), "a/b": jnp.zeros(1)}],
  ids=["twice", "leaf and group"],
)
def test_names_that_clash_are_refused(tree):
  with pytest.raises(ValueError, match=r"two leaves named 'a/b'|the group 'a'"):
    layout.named_leaves(tree)


def test_rebuild_inverts_named_leaves():
  state = make_state(1)
  leaves = layout.named_leaves(state)
  again = layout.rebuild(state, leaves)
  assert jax.tree.structure(again) == jax.tree.structure(state)
  assert all(a is b for n, a in layout.named_leaves(again).items() if (b := leaves[n]).size)


def test_differences_names_both_sides():
  saved = layout.describe({"w": np.zeros((2, 3), np.float32), "old": np.zeros(1, np.int8)})
  wanted = layout.describe({"w": np.zeros((2, 4), np.float32), "new": jax.random.key(0)})
  assert layout.differences(saved, wanted) == [
    "new is not there in the checkpoint, key<fry>[] in this program",
    "old is int8[1] in the checkpoint, not there in this program",
    "w is float32[2,3] in the checkpoint, float32[2,4] in this program",
  ]


def test_abstract_like_puts_abstract_specs_on_devices():
  mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Explicit,))

  def init():
    w = jax.random.normal(jax.random.key(0), (4, 2), out_sharding=PartitionSpec("fsdp"))
    return {"w": w, "key": jax.random.key(0)}

  with jax.set_mesh(mesh):
    shapes = jax.eval_shape(init)
  with pytest.raises(
    ValueError, match=r"'w' is to be restored onto an abstract mesh.*abstract_like"
  ):
    layout.restore_target("w", shapes["w"])
  concrete = layout.abstract_like(shapes, mesh)
  assert concrete["w"].sharding == NamedSharding(mesh, PartitionSpec("fsdp", None))
  assert concrete["key"].sharding == NamedSharding(mesh, PartitionSpec())
  layout.restore_target("w", concrete["w"])
