import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import make_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ats_jax.checkpoint import layout


def test_names_do_not_depend_on_python_classes():
  state = make_state(0)
  names = list(layout.named_arrays(state))
  assert "model/embed" in names and "model/layers/1/kernel" in names
  assert "opt_state/1/0/mu/layers/0/bias" in names
  assert list(layout.named_arrays({"q": {"weight": jnp.zeros(1)}})) == ["q"]
  router = {"weight": jnp.zeros(1), "bias": jnp.zeros(1)}
  assert set(layout.named_arrays({"router": router})) == {"router/weight", "router/bias"}
  adapted = {"weight": jnp.zeros(1), "adapter": {"a": jnp.zeros(1)}}
  assert set(layout.named_arrays({"q": adapted})) == {"q/weight", "q/adapter/a"}
  assert not any("value" in n for n in names)
  model_names = list(layout.named_arrays(state["model"], "model"))
  assert model_names == [n for n in names if n.startswith("model/")]


def test_a_leaf_that_is_no_array_is_refused_by_name():
  with pytest.raises(ValueError, match=r"'model/rate' is a float \(0.5\).*`extra`"):
    layout.named_arrays({"model": {"rate": 0.5}})


@pytest.mark.parametrize(
  "tree",
  [{"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)}, {"a": jnp.zeros(1), "a/b": jnp.zeros(1)}],
  ids=["twice", "leaf and group"],
)
def test_names_that_clash_are_refused(tree):
  with pytest.raises(ValueError, match=r"two leaves named 'a/b'|the group 'a'"):
    layout.named_arrays(tree)


def test_layers_go_by_their_index_whatever_stack_they_are_in():
  stack = lambda *shape: {"attn": {"q": jnp.zeros(shape)}}
  model = {
    "segments": [{"layers": [stack(2, 3), stack(2, 5)]}, {"layers": [stack(1, 7)]}],
    "embed": jnp.zeros(4),
  }
  stacks = {
    "segments/0/layers/0": range(0, 4, 2),
    "segments/0/layers/1": [1, 3],
    "segments/1/layers/0": (4,),
  }
  state = {"model": model, "opt_state": [{"mu": model}]}
  assert layout.describe(layout.named_arrays(state, stacks=stacks)) == {
    f"{part}/{name}": shape
    for part in ("model", "opt_state/0/mu")
    for name, shape in {
      "embed": "float32[4]",
      "layers/0/attn/q": "float32[3]",
      "layers/1/attn/q": "float32[5]",
      "layers/2/attn/q": "float32[3]",
      "layers/3/attn/q": "float32[5]",
      "layers/4/attn/q": "float32[7]",
    }.items()
  }
  assert "model/layers/3/attn/q" in layout.named_arrays(model, "model", stacks)


def test_differences_names_both_sides():
  describe = lambda tree: layout.describe(layout.named_arrays(tree))
  saved = describe({"w": np.zeros((2, 3), np.float32), "old": np.zeros(1, np.int8)})
  wanted = describe({"w": np.zeros((2, 4), np.float32), "new": jax.random.key(0)})
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
