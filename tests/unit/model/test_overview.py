import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ats_jax.model.count import parameter_overview


class Attention(nnx.Module):
  def __init__(self):
    self.q = nnx.Param(jnp.zeros((8, 4)))
    self.k = nnx.Param(jnp.zeros((8, 2), jnp.bfloat16))


class Model(nnx.Module):
  def __init__(self):
    self.blocks = nnx.List([Attention()])
    self.scale = nnx.Param(jnp.ones(()))


@pytest.fixture
def model():
  with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
    yield Model()


def test_an_nnx_module_reads_by_its_attributes(model):
  lines = parameter_overview(model).splitlines()
  assert lines == [
    "parameter   shape   dtype     size  bytes  sharding",
    "blocks.0.k  (8, 2)  bfloat16    16     32",
    "blocks.0.q  (8, 4)  float32     32    128",
    "scale       ()      float32      1      4",
    "total: 49 parameters, 164 bytes (0.000 GiB)",
  ]
  # Shapes are enough.
  assert parameter_overview(jax.eval_shape(Model)) == parameter_overview(model)


def test_shardings_and_the_bytes_of_one_device():
  mesh = AbstractMesh((4, 2), ("fsdp", "tensor"))

  def leaf(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

  tree = {"w": leaf((8, 6), "fsdp", "tensor"), "b": leaf((6,)), "plain": jnp.zeros(2)}
  table = parameter_overview(tree)
  w = next(line for line in table.splitlines() if line.startswith("w "))
  assert "'fsdp'" in w and "'tensor'" in w
  assert "total: 56 parameters, 224 bytes (0.000 GiB), 56 bytes" in table  # 4 * (6 + 6 + 2)


def test_a_leaf_that_is_no_array_is_named():
  with pytest.raises(ValueError, match=r"'block.rate' is a float, expected an array"):
    parameter_overview({"block": {"rate": 0.1}})
