"""What a process leaves that is killed in the middle of a write; a disk that is full."""

import os

import numpy as np

from ats_jax.checkpoint import CheckpointManager, committed_steps, integrity
from ats_jax.config.schema import CheckpointConfig

# Copies the folder before each file operation of a commit: what a kill at that moment would leave.
SNAPSHOTS = """
import shutil, sys, threading
from pathlib import Path
import numpy as np
from ats_jax.checkpoint import CheckpointManager
from ats_jax.config.schema import CheckpointConfig

directory, copies = Path(sys.argv[1]), Path(sys.argv[2])
count, busy = 0, False

def before(event, args):
  global count, busy
  operations = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
  if busy or event not in operations or threading.current_thread().name != "checkpoint_0":
    return
  busy = True
  shutil.copytree(directory, copies / str(count))
  count += 1
  busy = False

with CheckpointManager(directory, CheckpointConfig(keep=1)) as manager:
  manager.save(1, {"x": np.arange(1, 6)}, {"step": 1}, wait=True)
  sys.addaudithook(before)
  manager.save(2, {"x": np.arange(2, 7)}, {"step": 2}, wait=True)
  busy = True
"""


def test_every_moment_of_a_commit_leaves_an_intact_checkpoint(tmp_path, start_child):
  child = start_child(SNAPSHOTS, tmp_path / "checkpoints", tmp_path / "copies")
  _, err = child.communicate(timeout=300)
  assert child.returncode == 0, err
  seen = []
  for copy in sorted((tmp_path / "copies").iterdir(), key=lambda p: int(p.name)):
    steps = committed_steps(copy)
    assert all(integrity.find_damage(copy / str(s)) == [] for s in steps), copy
    if steps not in seen:
      seen.append(steps)
    with CheckpointManager(copy, CheckpointConfig()) as manager:
      step, state, extra = manager.restore_latest({"x": np.zeros(5, int)})
    assert step == steps[-1] and extra == {"step": step}
    np.testing.assert_array_equal(state["x"], np.arange(step, step + 5))
    assert not list((copy / "unfinished").glob("*"))
  assert seen == [[1], [1, 2], [2]]
  assert int(copy.name) > 20


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from ats_jax.checkpoint import CheckpointError, CheckpointManager
from ats_jax.config.schema import CheckpointConfig

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {f"w{i}": np.random.default_rng(i).random((512, 512), np.float32) for i in range(4)}
with CheckpointManager(Path(sys.argv[1]), CheckpointConfig()) as manager:
  manager.save(1, state, {}, wait=True)
  for step, limit in ((2, 700_000), (3, 300), (4, 10)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
      manager.save(step, state, {"note": "longer than ten bytes"})
      manager.wait()
    except CheckpointError as e:
      print(e)
    else:
      sys.exit(f"save {step} under a limit of {limit} bytes did not fail")
  resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
  manager.save(2, state, {})
  manager.wait()
  print("steps", manager.steps())
"""


def test_full_disk_is_a_clear_error_and_training_can_go_on(tmp_path, start_child):
  child = start_child(FULL_DISK, tmp_path)
  out, err = child.communicate(timeout=300)
  assert child.returncode == 0, err
  lines = out.splitlines()
  for step, line in zip((2, 3, 4), lines, strict=False):
    assert line.startswith(f"checkpoint {step} was not saved to {tmp_path}: ")
    assert "File too large" in line
    assert "Older checkpoints are intact: [1]. Raise the limit of a file" in line
  assert lines[-1] == "steps [1, 2]"
  assert committed_steps(tmp_path) == [1, 2]
  assert all(integrity.find_damage(tmp_path / str(s)) == [] for s in (1, 2))
  assert not os.listdir(tmp_path / "unfinished")
