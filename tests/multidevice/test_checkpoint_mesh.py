"""Restoring onto another mesh, and saving from several processes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from processes import run_job

from ats_jax.checkpoint import CheckpointManager, abstract_like, committed_steps, restore_tree
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


@pytest.mark.parametrize("before", [(2, 4), (1, 1)])
@pytest.mark.parametrize("after", [(1, 8), (4, 2), (1, 2), (1, 1)])
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


PROCESS = """
from pathlib import Path
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from ats_jax.checkpoint import CheckpointError, CheckpointManager, StopSignal
from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema import CheckpointConfig
from ats_jax.checkpoint.workdir import claim

directory = Path(argv[0])
for _ in range(2):
  with claim(directory / "run", from_config_dict(base_config())) as run:
    say("run", run.run)

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
cfg, stacks = CheckpointConfig(keep=3), {"s": (0, 1)}
with jax.set_mesh(mesh), CheckpointManager(directory, cfg, None, stacks) as manager:
  def state(step):
    return jax.jit(
      lambda: {
        "w": jax.random.normal(jax.random.key(step), (8, 4), out_sharding=P("fsdp")),
        "s": {"q": jax.random.normal(jax.random.key(step), (2, 8), out_sharding=P(None, "fsdp")),
              "k": jax.random.normal(jax.random.key(step), (2, 8), out_sharding=P(None, None))},
      })()

  for step in (1, 2, 3):
    manager.save(step, state(step), {"step": step})
  manager.save(3, state(3), {})
  manager.wait()
  jax.experimental.multihost_utils.sync_global_devices("saved")

  if rank == 0:
    with open(directory / "3" / "extra.json", "a") as f:
      f.write(" ")
  step, restored, extra = manager.restore_latest(state(0))
  for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state(2)), strict=True):
    for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
      np.testing.assert_array_equal(a.data, b.data)
  say("restored", step, extra["step"])
  jax.experimental.multihost_utils.sync_global_devices("restored")  # both have read the files

  if rank == 0:
    for step in (1, 2):
      (directory / str(step) / "extra.json").unlink()
  try:
    manager.restore_latest(state(0))
  except CheckpointError as e:
    say("error", str(e).splitlines()[0][:40])

  with StopSignal() as stop:
    if rank == 1:
      stop.requested = "SIGTERM"
    say("stop", stop.agreed(0))
"""


def test_two_processes_save_together_and_agree_on_run_and_step(tmp_path):
  first, second = run_job(PROCESS, tmp_path, tmp_path, devices=2)
  runs = {line for lines in (first[:2], second[:2]) for line in lines}
  assert runs == {f"run {(tmp_path / 'run' / 'run_id').read_text().strip()}"}
  first, second = first[2:], second[2:]
  assert first == ["restored 2 2", "error no intact checkpoint for step 'latest':", "stop SIGTERM"]
  assert second == [
    "restored 2 2",
    "error process 0 found no usable checkpoint; it",
    "stop SIGTERM",
  ]
  assert committed_steps(tmp_path) == [1, 2]
  assert (tmp_path / "3.damaged").is_dir()
