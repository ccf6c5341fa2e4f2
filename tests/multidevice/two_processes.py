"""What two processes of one job do in `test_two_processes.py`: a function for each story.

Each takes the number of its process, a folder of its own, and a function to say lines with.
"""

import contextlib
import functools
import logging
import shutil
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as absl_logging
from helpers import make_test_mesh, tiny_config
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ats_jax.checkpoint import CheckpointError, CheckpointManager, StopSignal, workdir
from ats_jax.checkpoint.local import LocalSnapshots
from ats_jax.config import base_config, from_config_dict
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import CheckpointConfig
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy.state import Decision, Judgement, PolicyState
from ats_jax.orchestrator.record.ledger import check_agreement
from ats_jax.sharding.mesh import local_rows, make_mesh, on_mesh, to_global
from ats_jax.sharding.rules import current_plan
from ats_jax.store import paths, shared_folder

type Say = Callable[..., None]


@contextlib.contextmanager
def logged(say: Say, until: str = "") -> Iterator[None]:
  """Say what is logged, up to some text."""

  class Handler(logging.Handler):
    def emit(self, record):
      message = record.getMessage()
      say("logged:", message.split(until)[0] if until else message)

  handler = Handler()
  absl_logging.get_absl_logger().addHandler(handler)
  try:
    yield
  finally:
    absl_logging.get_absl_logger().removeHandler(handler)


def folders_and_clocks(rank: int, folder: Path, say: Say) -> None:
  """They see one folder, one of them late; have two clocks; and see two folders."""

  def claim(place):
    try:
      with workdir.claim(paths.Path(place), tiny_config()):
        say("claimed")
    except ValueError as error:
      say(str(error).replace("\n", "|"))

  before = shared_folder.SHARED_SECS, shared_folder.SLOW_SECS, shared_folder._read
  shared_folder.SHARED_SECS, shared_folder.SLOW_SECS = 60.0, -1.0  # say at once that one waits
  with logged(say):
    claim(folder / "run")
    if rank:  # a folder that shows late what process 0 has written
      unseen = [""] * 3
      shared_folder._read = lambda path: unseen.pop() if unseen else before[2](path)
    claim(folder / "slow")
    shared_folder.SLOW_SECS, shared_folder._read = before[1:]
    if rank:
      real, ahead = shared_folder.time, lambda: time.time() + 100  # another clock
      shared_folder.time = types.SimpleNamespace(
        time=ahead, monotonic=time.monotonic, sleep=time.sleep
      )
    claim(folder / "run")
    if rank:
      shared_folder.time = real
    shared_folder.SHARED_SECS = 0.1
    claim(folder / "not shared" / str(rank))
  shared_folder.SHARED_SECS = before[0]


def agreement(rank: int, folder: Path, say: Say) -> None:
  """They compare what they see, remember and decide: the same, or with one difference."""
  del folder
  from readings import reading

  seen = lambda **changes: reading(0, **changes)._asdict()
  judgements = [Judgement(decisions=(Decision(0, Rollback(back), "state", ""),)) for back in (0, 1)]
  cases = {
    "same": (PolicyState(best_rate=2.0), seen(), judgements[0]),
    "memory": (PolicyState(best_rate=2.0 + 1e-12 * rank), seen(), Judgement()),
    "reading": (PolicyState(), seen(probe=2.0 + 1e-12 * rank), Judgement()),
    "decision": (PolicyState(), seen(), judgements[rank]),
    "same again": (PolicyState(), seen(probe=float("nan")), Judgement()),
  }
  for name, case in cases.items():
    try:
      check_agreement(*case)
      say(name, "agreed")
    except RuntimeError as error:
      say(name, str(error)[:36])


def explicit_mesh(**sizes: int) -> jax.sharding.Mesh:
  """A mesh of all four devices."""
  types_of_axes = (AxisType.Explicit,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types_of_axes)


def assert_same_parts(got: Any, want: Any) -> None:
  """Of the devices of this process."""
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
      np.testing.assert_array_equal(a.data, b.data)


def checkpoints(rank: int, folder: Path, say: Say) -> None:
  """They save together, and agree on the run, on the step and on when to stop."""
  for _ in range(2):
    with workdir.claim(paths.Path(folder / "run"), from_config_dict(base_config())) as run:
      say("run", run.run)
  cfg, stacks = CheckpointConfig(keep=3), {"s": (0, 1)}
  with (
    jax.set_mesh(explicit_mesh(fsdp=4)),
    CheckpointManager(paths.Path(folder), cfg, None, stacks) as manager,
  ):

    def state(step):
      key = jax.random.key(step)
      cut = lambda *shape, spec: jax.random.normal(key, shape, out_sharding=spec)
      return {
        "w": cut(8, 4, spec=P("fsdp")),
        "s": {"q": cut(2, 8, spec=P(None, "fsdp")), "k": cut(2, 8, spec=P(None, None))},
      }

    state = jax.jit(state, static_argnums=0)
    for step in (1, 2, 3):
      manager.save(step, state(step), {"step": step})
    manager.save(3, state(3), {})
    manager.wait()
    sync_global_devices("saved")
    if rank == 0:
      with open(folder / "3" / "extra.json", "a") as f:
        f.write(" ")
    step, restored, extra = manager.restore_latest(state(0))
    assert_same_parts(restored, state(2))
    say("restored", step, extra["step"])
    sync_global_devices("restored")  # both have read the files
    if rank == 0:
      for step in (1, 2):
        (folder / str(step) / "extra.json").unlink()
    try:
      manager.restore_latest(state(0))
    except CheckpointError as e:
      say("error", str(e).splitlines()[0][:40])
    with StopSignal() as stop:
      if rank == 1:
        stop.requested = "SIGTERM"
      say("stop", stop.agreed(0))


def stages(rank: int, folder: Path, say: Say) -> None:
  """Each has a stage of a pipeline, and saves the layers of it."""
  del rank
  stacks = {"s": (0, 1, 2, 3)}
  with (
    jax.set_mesh(explicit_mesh(stage=2, fsdp=2)),
    CheckpointManager(paths.Path(folder), CheckpointConfig(), None, stacks) as manager,
  ):

    def state(step):
      key = jax.random.key(step)
      cut = lambda *shape, spec: jax.random.normal(key, shape, out_sharding=spec)
      of_layers = {"q": cut(4, 8, spec=P("stage", "fsdp")), "k": cut(4, 6, spec=P("stage", None))}
      return {"w": cut(8, 4, spec=P("fsdp")), "s": of_layers}

    state = jax.jit(state, static_argnums=0)
    manager.save(1, state(1), {})
    manager.wait()
    sync_global_devices("stages saved")
    assert_same_parts(manager.restore_latest(state(0))[1], state(1))
    say("restored")


def positions(rank: int, folder: Path, say: Say) -> None:
  """Along a row, each has positions of its own."""
  del rank, folder
  mesh = make_test_mesh(1, 1, 1, context=4)
  with jax.set_mesh(mesh):
    rows = np.arange(2 * 4 * 8, dtype=np.int32).reshape(2, 4, 8)
    assert local_rows(mesh, 4).tolist() == [0, 1, 2, 3]
    x = to_global({"tokens": rows}, mesh)["tokens"]
    assert x.shape == rows.shape
    for shard in x.addressable_shards:
      assert shard.data.shape == (2, 4, 2)
      np.testing.assert_array_equal(shard.data, rows[shard.index])
    say(str(sorted(s.index[2].start or 0 for s in x.addressable_shards)))


def hosts(rank: int, folder: Path, say: Say) -> None:
  """Each is a host of an exchange of tokens, whose plan of rows goes by processes."""
  del rank, folder
  exchange = {"mesh.expert": 4, "moe.num_experts": 8, "moe.exchange": "hierarchical"}
  cfg = tiny_config(exchange)
  with on_mesh(cfg, make_mesh(cfg)):
    say("hosts", current_plan().hosts)


def snapshots(rank: int, folder: Path, say: Say) -> None:
  """Parts of snapshots on their own disks: replicas of each other, then halves of a matrix."""
  cfg = CheckpointConfig(local_every=1, local_dir=str(folder / str(rank)))
  mesh, run = jax.make_mesh((2, 2), ("data", "fsdp")), RunIdentity("0123456789abcdef", "settings")

  def state(step, across):
    """Kept by both; with `across`, each process holds a half of a matrix."""
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    matrix = jnp.arange(32.0).reshape(8, 4) * step
    return {"w": put(matrix, P("data") if across else P("fsdp")), "n": put(jnp.bfloat16(step), P())}

  def look(label, across, after=0):
    local = LocalSnapshots(cfg, run, "mesh")
    found = local.newest(after)
    if found is not None:
      step, extra = found
      like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      assert_same_parts(local.read(jax.tree.map(like, state(step, across))), state(step, across))
      found = step, extra
    say(label, found)

  with logged(say, until=":"):
    for across in (False, True):
      local = LocalSnapshots(cfg, run, "mesh")
      for step in (1, 2):
        local.save(step, state(step, across), {"rank": rank})
        local.wait()
      look("both", across)
      own = local._own
      if rank:
        shutil.rmtree(own / "2")
      look("one lost", across)
      if rank and (own / "2").exists():
        (own / "2" / "data.bin").write_bytes(b"damaged")
      look("one damaged", across)
      if rank:
        shutil.rmtree(own)
      look("all of one lost", across)
      if not rank:
        shutil.rmtree(own)
      look("nothing is newer", across, after=2)
      shutil.rmtree(folder / str(rank), ignore_errors=True)


STORIES = (folders_and_clocks, agreement, checkpoints, stages, positions, hosts, snapshots)


def tell(rank: int, folder: Path) -> None:
  """All stories, in each process; the lines of each come to `folder`."""
  for story in STORIES:
    name = story.__name__
    (folder / name).mkdir(exist_ok=True)
    with open(folder / f"{name}.{rank}", "w") as file:
      story(rank, folder / name, functools.partial(print, file=file))
