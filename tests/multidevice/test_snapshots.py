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

STEPS = 24
SETTINGS = (
  *runs.TINY,
  f"num_steps={STEPS}",
  "model.dropout=0.1",
  "data.seq_len=32",
  "data.batch_size=8",
  "optimizer.warmup_steps=5",
  "checkpoint.every_steps=1000",  # at the end only
  "checkpoint.local_every=6",
  "eval.every_steps=0",
  "log.writers=console,jsonl",
  "sample.max_tokens=0",
)
LAUNCH = ("--processes=2", "--restarts=0")


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
  begin = runs.read_to(job, 16)
  (first,) = [c for c in psutil.Process(job.pid).children() if c.environ()["JAX_PROCESS_ID"] == "0"]
  first.send_signal(signal.SIGKILL)
  job.communicate()
  assert job.returncode == 137, begin
  steps = lambda rank: {int(p.name) for p in disks.glob(f"{rank}/*/process_{rank}/[0-9]*")}
  # On a busy machine the one of step 12 may not be written when the process dies.
  assert {6, 12} & steps(0) & steps(1), (steps(0), steps(1))
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
