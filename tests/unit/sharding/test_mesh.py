"""The mesh that a config asks for, and host rows -> global arrays."""

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, micro_batches, random_rows, tiny_config

from ats_jax.planner.abstract import abstract_mesh
from ats_jax.sharding.mesh import (
  batch_sharding,
  hosts_along,
  local_rows,
  make_mesh,
  on_mesh,
  to_global,
)
from ats_jax.sharding.rules import MESH_AXES, current_plan
from ats_jax.step.program import make_program

AXES = ("data", "fsdp", "expert", "tensor")


def config(data=-1, fsdp=1, expert=1, tensor=1, batch_size=8, accum_steps=1):
  sizes = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.expert": expert, "mesh.tensor": tensor}
  return tiny_config(sizes | {"data.batch_size": batch_size, "step.accum_steps": accum_steps})


def test_make_mesh():
  for sizes, shape in (
    ((-1, 1, 1, 1), (8, 1, 1, 1)),
    ((-1, 2, 1, 2), (2, 2, 1, 2)),
    ((1, 4, 1, 2), (1, 4, 1, 2)),
    ((-1, 1, 2, 2), (2, 1, 2, 2)),
  ):
    mesh = make_mesh(config(*sizes))
    assert mesh.axis_names == MESH_AXES and tuple(mesh.shape[a] for a in AXES) == shape
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    assert sorted(d.id for d in mesh.devices.flat) == list(range(8))
  mesh = make_mesh(config(fsdp=2), jax.devices()[:4])
  assert mesh.size == 4 and mesh.shape["data"] == mesh.shape["fsdp"] == 2
  # Shards of `tensor` do not count as rows.
  assert make_mesh(config(2, 2, 1, 2, batch_size=4)).shape["tensor"] == 2


@pytest.mark.parametrize(
  ("sizes", "batch", "words"),
  [
    (
      (-1, 8, 1, 2),
      (16, 1),
      r"mesh.fsdp=8 x mesh.expert=1 x mesh.context=1 x mesh.tensor=2 = 16 does not divide",
    ),
    (
      (2, 2, 1, 1),
      (8, 1),
      r"2x2x1x1x1 \(.*data, fsdp, expert, context, tensor\) needs 4 devices, there are 8",
    ),
    ((4, 2, 1, 2), (8, 1), "needs 16 devices, there are 8"),
    ((-1, 1, 1, 1), (12, 1), "data.batch_size=12 / step.accum_steps=1 = 12 rows.*multiple of 8"),
    ((-1, 2, 1, 1), (8, 2), r"= 4 rows a.*=4 x mesh.fsdp=2 x mesh.expert=1 = 8.*multiple of 16"),
    ((-1, 1, 4, 1), (4, 1), r"= 4 rows a.*mesh.data=2 x mesh.fsdp=1 x mesh.expert=4 = 8"),
  ],
)
def test_make_mesh_refuses(sizes, batch, words):
  with pytest.raises(ValueError, match=words):
    make_mesh(config(*sizes, *batch))


def test_one_device_is_told_how_to_simulate_more():
  cfg = tiny_config({"mesh.fsdp": 2, "mesh.tensor": 2})
  with pytest.raises(ValueError, match=r"the one device\. .*device_count=4 simulates 4 devices"):
    make_mesh(cfg, jax.devices()[:1])


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_rows_become_global_arrays(shape):
  cfg, mesh = tiny_config(), make_test_mesh(*shape)
  batch = micro_batches(random_rows(cfg, 16), 2)
  assert local_rows(mesh, 8).tolist() == list(range(8))  # one process holds them all
  with jax.set_mesh(mesh):
    arrays = to_global(batch, mesh)
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, batch[name])
    assert array.dtype == batch[name].dtype and array.sharding == batch_sharding(mesh, 3)
    rows = 8 // (shape[0] * shape[1])
    assert {s.data.shape for s in array.addressable_shards} == {(2, rows, cfg.data.seq_len)}
  flat = to_global({"x": batch["tokens"][0]}, mesh)["x"]
  assert flat.sharding == batch_sharding(mesh, 2) and flat.shape == (8, cfg.data.seq_len)


@pytest.mark.parametrize(
  ("lines", "hosts"),
  [
    ([[0, 0, 0, 0]], 1),
    ([[0, 0, 1, 1]], 2),
    ([[3, 3, 1, 1], [0, 0, 2, 2]], 2),  # copies on other hosts
    ([[0, 1, 2, 3]] * 2, 4),  # `tensor` takes the devices of a host
  ],
)
def test_hosts_share_an_axis_in_blocks_of_neighbours(lines, hosts):
  assert hosts_along(np.array(lines)) == hosts


@pytest.mark.parametrize(
  ("lines", "words"),
  [
    ([[0, 0, 0, 1]], r"mesh.expert=4 are on the hosts \[0, 0, 0, 1\]"),
    ([[0, 1, 0, 1]], r"\[0, 1, 0, 1\].*side by side"),
    ([[0, 0, 1, 1], [2, 2, 2, 2]], r"hosts \[2, 2, 2, 2\], elsewhere on 2.*set moe.exchange.hosts"),
    ([[0, 0, 1]], "as many of them"),
  ],
)
def test_hosts_that_share_an_axis_otherwise_are_refused(lines, words):
  with pytest.raises(ValueError, match=words):
    hosts_along(np.array(lines))


SPREAD = {"moe.num_experts": 8, "moe.exchange": "hierarchical", "mesh.expert": 8}


@pytest.mark.parametrize(
  ("changes", "hosts", "said"),
  [
    ({}, 1, "one host: as allgather"),  # all devices are of one process
    ({"moe.exchange.hosts": 2}, 2, "between 2 hosts, then within each"),
    ({"moe.exchange.hosts": 2, "mesh.expert": 1, "mesh.fsdp": 8}, 1, None),
    ({"moe.exchange": "allgather"}, 1, None),
  ],
)
def test_a_plan_and_the_log_know_the_hosts_of_experts(changes, hosts, said):
  cfg = tiny_config(SPREAD | changes)
  with on_mesh(cfg, make_mesh(cfg)):
    assert current_plan().hosts == hosts
    if cfg.mesh.expert > 1:
      assert make_program(cfg).facts().get("exchange of tokens") == said


@pytest.mark.parametrize(
  ("sizes", "hosts"),
  [({"expert": 8}, 1), ({"expert": 32}, 4), ({"expert": 4, "tensor": 4}, 2), ({"expert": 12}, 3)],
)
def test_without_devices_a_host_has_eight(sizes, hosts):
  changes = {"moe.num_experts": 96, "data.batch_size": 96, "model.num_kv_heads": 4}
  cfg = tiny_config(SPREAD | changes | {f"mesh.{axis}": size for axis, size in sizes.items()})
  with on_mesh(cfg, abstract_mesh(cfg)):
    assert current_plan().hosts == hosts
