"""Real runs on emulators of real stores, through gcsfs and s3fs: killed, contended, resumed."""

import random
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
import runs
import stores
from commands import forked, started, train_flags

from ats_jax import exits
from ats_jax.checkpoint import committed_steps, integrity, parted, reader
from ats_jax.store import paths
from ats_jax.store.paths import Path

pytestmark = pytest.mark.stores

STEPS, EVERY = 60, 10
TWO, LAUNCH = ("mesh.data=1", "mesh.fsdp=2"), ("--processes=2", "--restarts=0")
SETTINGS = (
  *runs.TINY,
  f"num_steps={STEPS}",
  "model.dropout=0.1",
  "data.seq_len=32",
  "data.batch_size=8",
  "optimizer.warmup_steps=5",
  f"checkpoint.every_steps={EVERY}",
  "eval.every_steps=20",
  "log.writers=console,jsonl,csv,tensorboard",
  "sample.max_tokens=4",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
  for i in range(40):
    (folder / f"{i}.txt").write_text(" ".join(draw.choices(("def", "self", "in", "x"), k=60 + i)))
  return (*SETTINGS, f"data.paths={folder}")


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
  """The workdir of the run that nothing interrupts, on the disk."""
  folder = tmp_path_factory.mktemp("whole")
  runs.finish(runs.start(folder, *settings))
  return Path(folder)


@pytest.fixture(scope="module")
def whole_of_two(settings, tmp_path_factory):
  """The same of two processes that share the weights."""
  folder = tmp_path_factory.mktemp("two")
  runs.finish(runs.start(folder, *settings, *TWO, launch=LAUNCH))
  return Path(folder)


@pytest.fixture(scope="module", params=stores.STORES)
def store(request):
  """The address of an empty bucket, and the variables that lead there."""
  with stores.STORES[request.param]() as env, stores.variables(env):
    yield f"{request.param}://{stores.BUCKET}", env


def arrays(workdir, step):
  """On the first device of this process, whichever it was saved from."""
  here = ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
  checkpointer = ocp.PyTreeCheckpointer()
  with paths.fetched(workdir / "checkpoints" / str(step) / "state") as local:
    parted.join(local, reader.handler())
    tree = checkpointer.metadata(local).item_metadata.tree
    tree = checkpointer.restore(local, restore_args=jax.tree.map(lambda _: here, tree))
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return {n: np.asarray(jax.random.key_data(x) if is_key(x) else x) for n, x in tree.items()}


def test_killed_and_taken_over_by_one_of_two(settings, whole, store):
  """kill -9; then the command is started twice at once, as two requeues of a job may be."""
  root, env = store
  workdir = Path(f"{root}/killed")
  runs.stop_at(runs.start(str(workdir), *settings, **env), 2 * EVERY + 5, signal.SIGKILL)
  saved = committed_steps(workdir / "checkpoints")
  assert saved and saved[-1] < STEPS and (workdir / ".lock").exists()

  both = [runs.start(str(workdir), *settings, **env) for _ in range(2)]
  said = [p.communicate(timeout=runs.TIMEOUT_SECS)[0] for p in both]
  codes = [p.returncode for p in both]
  assert sorted(codes) == [exits.DONE, exits.REFUSED], said
  assert "another process trains in" in said[codes.index(exits.REFUSED)]
  assert "Traceback" not in "".join(said)
  assert not (workdir / ".lock").exists()

  assert_same_end(whole, workdir)


def test_what_another_process_writes_is_read(store):
  """Though this one has listed the folder: drivers keep listings."""
  root, env = store
  folder = Path(f"{root}/listed")
  paths.write(folder / "one", "1")
  assert [path.name for path in folder.iterdir()] == ["one"]
  code = f"""
from ats_jax.store import paths
for name, text in ("one", "longer"), ("two", "2"):
  paths.write(paths.parse({str(folder)!r}) / name, text)
"""
  done = started("timeit", "-n1", "-r1", code, **env)
  assert done.code == 0, done.err
  assert paths.read(folder / "one") == b"longer" and paths.read(folder / "two") == b"2"


def test_a_run_that_lives_keeps_others_out(settings, store):
  root, env = store
  workdir = f"{root}/alive"
  process = runs.start(workdir, *settings, "num_steps=1000000", **env)
  try:
    runs.read_to(process, 3)
    other = started("ats_jax.train", *train_flags(workdir, *settings), **env)
    assert other.code == exits.REFUSED and "Traceback" not in other.err
    assert f"another process trains in {workdir} now" in other.err
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=runs.TIMEOUT_SECS)
    assert process.returncode == exits.STOPPED
  finally:
    process.kill()
    process.communicate()
  assert not (Path(workdir) / ".lock").exists()


def assert_same_end(one, other):
  left, right = arrays(one, STEPS), arrays(other, STEPS)
  assert left.keys() == right.keys() and len(left) > 20
  for name, value in left.items():
    np.testing.assert_array_equal(value, right[name], err_msg=name)
  assert runs.losses(one) == runs.losses(other)


def test_two_processes(settings, whole_of_two, store):
  """Each puts its shards, process 0 commits; both are killed, and start again."""
  root, env = store
  workdir = Path(f"{root}/two")
  job = runs.start(str(workdir), *settings, *TWO, launch=LAUNCH, **env)
  begin = runs.read_to(job, 2 * EVERY + 5)
  for process in psutil.Process(job.pid).children():
    process.kill()
  job.communicate()
  assert job.returncode == 137, begin
  (workdir / ".lock").unlink()  # the wait for it is tested above
  runs.finish(runs.start(str(workdir), *settings, *TWO, launch=LAUNCH, **env))
  assert_same_end(whole_of_two, workdir)
  folder = workdir / "checkpoints" / str(STEPS)
  assert integrity.find_damage(folder) == []
  names = paths.files(folder)
  assert {name.split("/")[1] for name in names if "ocdbt.process" in name} == {
    "ocdbt.process_0", "ocdbt.process_1"
  }  # fmt: skip


def test_commands_read_it(store, whole, whole_of_two):
  """One process reads what two have written too."""
  root, env = store
  for name, same in ("killed", whole), ("two", whole_of_two):
    result = started("ats_jax", "evaluate", f"--workdir={root}/{name}", **env)
    assert result.code == exits.DONE, result.err
    assert result.out == forked("ats_jax", "evaluate", f"--workdir={same}").out
  rows = started("ats_jax", "check_env", f"--workdir={root}", **env)
  assert "claims          ok      the store refuses a write" in rows.out, rows
