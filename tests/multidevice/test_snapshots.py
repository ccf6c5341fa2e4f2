"""A job of two real processes goes on from snapshots on their own disks, one of which is lost."""

import random
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
import runs
from processes import run_job

STEPS = 40
SETTINGS = (
  *runs.TINY,
  f"num_steps={STEPS}",
  "model.dropout=0.1",
  "data.seq_len=32",
  "data.batch_size=8",
  "optimizer.warmup_steps=5",
  "checkpoint.every_steps=1000",  # at the end only
  "checkpoint.local_every=10",
  "eval.every_steps=0",
  "log.writers=console,jsonl",
  "sample.max_tokens=0",
)
LAUNCH = ("--processes=2", "--restarts=0")
PARTS = """
import logging, shutil
import jax.numpy as jnp
import numpy as np
from absl import logging as absl_logging
from jax.sharding import NamedSharding, PartitionSpec as P
from ats_jax.checkpoint.local import LocalSnapshots
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import CheckpointConfig

class Say(logging.Handler):
  def emit(self, record):
    say("logged:", record.getMessage().split(":")[0])

absl_logging.get_absl_logger().addHandler(Say())
cfg = CheckpointConfig(local_every=1, local_dir=f"{argv[0]}/{rank}")
mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
run = RunIdentity("0123456789abcdef", "settings")
place = lambda spec: NamedSharding(mesh, spec)

def state(step, across=False):
  "Kept by both; with `across`, each process holds a half of a matrix."
  spec = P("data") if across else P("fsdp")
  matrix = jnp.arange(32.0).reshape(8, 4) * step
  return jax.device_put({"w": matrix, "n": jnp.bfloat16(step)}, {"w": place(spec), "n": place(P())})

def look(label, after=0):
  snapshots = LocalSnapshots(cfg, run, "mesh")
  found = snapshots.newest(after)
  if found is not None:
    step, extra = found
    restored = snapshots.read(jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(step, across)))
    same = all(
      np.array_equal(a.data, b.data)
      for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state(step, across)), strict=True)
      for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )
    found = step, extra, same
  say(label, found)

for across in (False, True):
  snapshots = LocalSnapshots(cfg, run, "mesh")
  for step in (1, 2):
    snapshots.save(step, state(step, across), {"rank": rank})
    snapshots.wait()
  look("both")
  own = snapshots._own
  if rank:
    shutil.rmtree(own / "2")
  look("one lost")
  if rank:
    (own / "2" / "data.bin").write_bytes(b"damaged") if (own / "2").exists() else None
  look("one damaged")
  if rank:
    shutil.rmtree(own)
  look("all of one lost")
  if not rank:
    shutil.rmtree(own)
  look("nothing is newer", after=2)
  shutil.rmtree(argv[0] + f"/{rank}", ignore_errors=True)
"""


def test_parts_of_two_processes(tmp_path):
  """Replicas: a lost or damaged part comes from the peer. Halves: an older one, or none."""
  for rank, said in enumerate(run_job(PARTS, tmp_path, tmp_path / "disks", devices=2)):
    found = [line for line in said if not line.startswith("logged")]
    two, one = "(2, {'rank': 0}, True)", "(1, {'rank': 0}, True)"
    assert found == [
      f"both {two}", f"one lost {two}", f"one damaged {two}", f"all of one lost {two}",
      "nothing is newer None",
      f"both {two}", f"one lost {one}", f"one damaged {one}", "all of one lost None",
      "nothing is newer None",
    ]  # fmt: skip
    got = [line for line in said if "of this process is gone" in line]
    assert len(got) == (3 if rank else 0)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
  for i in range(40):
    (folder / f"{i}.txt").write_text(" ".join(draw.choices(("def", "self", "in", "x"), k=60 + i)))
  return (*SETTINGS, f"data.paths={folder}")


def arrays(workdir):
  """The last checkpoint, which two processes wrote, on the first device of this one."""
  folder, checkpointer = workdir / "checkpoints" / str(STEPS) / "state", ocp.PyTreeCheckpointer()
  here = ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
  tree = checkpointer.metadata(folder).item_metadata.tree
  found = checkpointer.restore(folder, restore_args=jax.tree.map(lambda _: here, tree))
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return {n: np.asarray(jax.random.key_data(x) if is_key(x) else x) for n, x in found.items()}


@pytest.mark.thorough
def test_a_lost_snapshot_is_that_of_its_peer(settings, tmp_path):
  """Each process has a folder of its own, as on two machines; that of process 1 is deleted."""
  disks = tmp_path / "disks"
  settings = (*settings, f"checkpoint.local_dir={disks}/$JAX_PROCESS_ID")
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  runs.finish(runs.start(whole, *settings, launch=LAUNCH))
  assert not list(disks.glob("*/*")), "the last checkpoint has replaced all"

  job = runs.start(killed, *settings, launch=LAUNCH)
  begin = runs.read_to(job, 27)
  (first,) = [c for c in psutil.Process(job.pid).children() if c.environ()["JAX_PROCESS_ID"] == "0"]
  first.send_signal(signal.SIGKILL)
  job.communicate()
  assert job.returncode == 137, begin
  steps = lambda rank: {int(p.name) for p in disks.glob(f"{rank}/*/process_{rank}/[0-9]*")}
  # On a busy machine the one of step 20 may not be written when the process dies.
  assert {10, 20} & steps(0) & steps(1), (steps(0), steps(1))
  assert not (killed / "checkpoints").exists() or not list((killed / "checkpoints").glob("[0-9]*"))
  shutil.rmtree(disks / "1")

  said = runs.finish(runs.start(killed, *settings, launch=LAUNCH))
  assert "[1] snapshot " in said and "of this process is gone: got " in said, said
  assert "going on from snapshot " in said and "later than any checkpoint" in said
  assert runs.losses(killed) == runs.losses(whole)
  left, right = arrays(killed), arrays(whole)
  assert left.keys() == right.keys() and len(left) > 20
  for name in left:
    np.testing.assert_array_equal(left[name], right[name], err_msg=name)
