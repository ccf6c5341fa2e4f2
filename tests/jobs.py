"""Runs of several real processes that a test disturbs: tiny ones, and a way to kill them anywhere.

`KILLER` is a config file. Its processes note the rows of each batch that they train on, and the one
that is planned to die there kills itself in the middle of a phase.
"""

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import runs
from xla_flags import QUICK

BATCH = 12  # divides by 1, 2, 3 and 4
TINY = (
  *runs.TINY,
  "data.seq_len=32",
  f"data.batch_size={BATCH}",
  "optimizer.warmup_steps=5",
  "optimizer.schedule=constant",
  "eval.every_steps=0",
  "log.writers=console,jsonl",
  "sample.max_tokens=0",
)
KILLER = """
import json
import os
import signal
import threading
import time
import zlib

import numpy as np

from ats_jax.store import paths
from ats_jax.train import open as opening_module
from ats_jax.train.run import Run
from ats_jax.checkpoint.manager import CheckpointManager
from ats_jax.step.program import Program
from configs.debug import get_config  # noqa: F401

FOLDER, RANK = os.environ["KILLS"], int(os.environ["JAX_PROCESS_ID"])
with open(f"{FOLDER}/plan") as file:
  plan = file.read().split()
done = f"{FOLDER}/done"
next_kill = plan[os.path.getsize(done)] if os.path.getsize(done) < len(plan) else ""
record = open(f"{FOLDER}/rows.{os.getpid()}", "w")


def reach(phase):
  if next_kill == f"{phase}:{RANK}":
    with open(done, "a") as file:
      file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)


open_data, next_batch, made = opening_module.open_data, Run.next_batch, Run.finish_update
compile_step, commit = Program.compile_train_step, CheckpointManager._commit
commit_folder = paths.commit_folder
steps_taken = 0


def opening(*args):
  reach("start")
  return open_data(*args)


def compiling(*args):
  threading.Timer(0.05, reach, ["compile"]).start()
  return compile_step(*args)


def batch_of(self):
  batch = next_batch(self)
  micro, rows = batch["tokens"].shape[1], {}
  for shard in batch["tokens"].addressable_shards:
    data, first = np.asarray(shard.data), shard.index[1].start or 0
    for part, row in np.ndindex(data.shape[:2]):
      rows[part * micro + first + row] = zlib.crc32(data[part, row].tobytes())
  print(json.dumps([self.step + 1, time.time(), rows]), file=record, flush=True)
  return batch


def making(self, *args):
  global steps_taken
  steps_taken += 1
  if steps_taken == 6:
    reach("step")
  made(self, *args)


def committing(self, *args):
  reach("save")
  commit(self, *args)
  if RANK:
    reach("commit")


def renaming(*args):
  reach("commit")
  commit_folder(*args)
  reach("committed")


opening_module.open_data, Run.next_batch, Run.finish_update = opening, batch_of, making
Program.compile_train_step, CheckpointManager._commit = compiling, committing
paths.commit_folder = renaming
"""


def text(folder: Path) -> str:
  """Some files to train on; the setting that says so."""
  draw = random.Random(0)
  for i in range(40):
    (folder / f"{i}.txt").write_text(" ".join(draw.choices(("def", "self", "in", "x"), k=60 + i)))
  return f"data.paths={folder}"


def launch(
  workdir: Path, size: int, *settings: str, restarts: int = 1, config: str = "configs/debug.py",
  **env: str,
) -> subprocess.Popen:  # fmt: skip
  """Start a job; its output comes as that of `runs.start`."""
  flags = (f"--processes={size}", f"--restarts={restarts}")
  return runs.start(workdir, *settings, config=config, launch=flags, **{"XLA_FLAGS": QUICK} | env)


def pid_of(job: subprocess.Popen, rank: int) -> int:
  """Of a process of a job."""
  (found,) = (
    child.pid
    for child in psutil.Process(job.pid).children()
    if child.environ()["JAX_PROCESS_ID"] == str(rank)
  )
  return found


class Kills:
  """A run in one workdir whose processes die as planned."""

  def __init__(self, folder: Path, settings: tuple[str, ...], plan: tuple[str, ...] = ()):
    """Plan the deaths: "step:1" is that of process 1 in a step."""
    self.workdir, self._folder, self._settings = folder / "run", folder, settings
    (folder / "plan").write_text(" ".join(plan))
    (folder / "done").touch()
    (folder / "killer.py").write_text(KILLER)

  def launch(self, size: int, restarts: int = 0) -> tuple[int, str]:
    """Run so many processes until all is done or given up; exit code and output."""
    job = launch(
      self.workdir, size, *self._settings, restarts=restarts,
      config=str(self._folder / "killer.py"), KILLS=str(self._folder),
    )  # fmt: skip
    output, _ = job.communicate(timeout=runs.TIMEOUT_SECS)
    return job.returncode, output

  def killed(self) -> int:
    """How many of the planned deaths have come."""
    return (self._folder / "done").stat().st_size

  def batches(self) -> list[tuple[int, float, dict[str, int], int]]:
    """What was trained on: step, time, checksum of each row by its place in the batch, process."""
    found: list[Any] = []
    for path in self._folder.glob("rows.*"):
      lines = re.findall(r"^\[.*\]$", path.read_text(), re.MULTILINE)  # the last may be torn
      found += [(*json.loads(line), int(path.suffix[1:])) for line in lines]
    return sorted(found, key=lambda row: row[1])

  def rows(self) -> dict[int, dict[str, int]]:
    """Checksums by step and place, after a check that all who trained on a place saw the same."""
    found: dict[int, dict[str, int]] = {}
    for step, _, rows, _ in self.batches():
      known = found.setdefault(step, {})
      assert {**known, **rows} == {**rows, **known}, f"step {step} was made of other rows"
      known |= rows
    return found
