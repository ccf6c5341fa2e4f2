"""The folder of runs: space, speed, locks, renames and the clock of its file system, or a store."""

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import PurePath

import psutil

from ats_jax.cluster.preflight.results import CheckResult, CheckVerdict, check_result
from ats_jax.metrics.memory import GIB
from ats_jax.store import paths
from ats_jax.store.paths import Path

# Written and read back to measure the speed.
DISK_BYTES = 2**28
STORE_BYTES = 2**24
_CHUNK = 2**24
# File systems that several machines may share, by the names in /proc/mounts.
SHARED = (
  "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "wekafs",
  "panfs", "orangefs", "virtiofs", "9p", "fuse.",
)  # fmt: skip
# Limits for advice.
SLOW_MB_PER_SEC = 100
LOW_GIB = 20  # free
SKEW_SECS = 2.0  # of the clock of a file system
_TRY_LOCK = """
import fcntl, sys
try:
  fcntl.flock(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
  sys.exit(1)
"""


def folder_rows(workdir: Path) -> list[CheckResult]:
  """What a run would find in its workdir; what is written there is removed again.

  Args:
    workdir: local or on a store; it need not exist yet.
  """
  try:
    return _store_rows(workdir) if paths.is_remote(workdir) else _local_rows(workdir)
  except paths.errors() as e:
    why = f"{workdir}: {paths.reason(e)}"
    return [
      CheckResult(
        "workdir", why, CheckVerdict.BAD, "Choose another --workdir, or mend its permissions."
      )
    ]


def _local_rows(workdir: Path) -> list[CheckResult]:
  here = paths.absolute(workdir)
  while not os.path.isdir(here):  # a run makes what is missing
    here = here.parent
  kind = file_system(os.path.realpath(here), _mounts())
  shared = kind.startswith(SHARED)
  trial = here / f".check_env.{secrets.token_hex(4)}"
  os.mkdir(trial)
  try:
    rows = [
      _space_row(workdir, here, kind, shared),
      _speed_row(trial),
      _whole_row(trial, shared),
      clock_row(clock_skew(trial)),
    ]
  finally:
    shutil.rmtree(trial)
  return rows


def _mounts() -> dict[str, str]:
  return {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}


def file_system(folder: str, mounts: dict[str, str]) -> str:
  """The kind of file system that a folder is on; `mounts` are kinds by mount points."""
  above = [str(p) for p in (PurePath(folder), *PurePath(folder).parents)]
  return next((mounts[p] for p in above if p in mounts), "unknown")


def _space_row(workdir: Path, here: Path, kind: str, shared: bool) -> CheckResult:
  total, _, free = shutil.disk_usage(here)
  text = f"{workdir}: {free / GIB:,.1f} of {total / GIB:,.1f} GiB free, {kind}"
  text += ", shared" if shared else ", of this machine only: a job on several needs a shared one"
  problems = []
  if free < LOW_GIB * GIB:
    problems.append(
      "Little space: a checkpoint with moments takes 12 bytes a parameter, checkpoint.keep of them "
      "and one more."
    )
  if kind in ("tmpfs", "ramfs"):
    problems.append("It is in memory: a restart of the machine loses it.")
  return check_result("workdir", text, problems)


def _speed_row(trial: Path) -> CheckResult:
  """Write a file to the disk itself, and read it from there."""
  file, data = trial / "speed", os.urandom(_CHUNK)
  start = time.perf_counter()
  with open(file, "wb", buffering=0) as f:
    for _ in range(DISK_BYTES // _CHUNK):
      f.write(data)
    os.fsync(f.fileno())
    wrote = time.perf_counter() - start
    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of memory: read it again
  start = time.perf_counter()
  with open(file, "rb", buffering=0) as f:
    while f.read(_CHUNK):
      pass
  return speed_row(DISK_BYTES / wrote, DISK_BYTES / (time.perf_counter() - start))


def speed_row(write: float, read: float) -> CheckResult:
  """The row of a folder that is written and read at so many bytes a second."""
  text = f"writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s (256 MiB, flushed)"
  problems = []
  if write < SLOW_MB_PER_SEC * 1e6:
    minutes = 12e9 / write / 60
    problems.append(
      f"Slow: a checkpoint of 1e9 parameters with moments takes {minutes:.0f} minutes. It is "
      "written in the background; let checkpoint.every_steps take longer than that."
    )
  return check_result("disk", text, problems)


def _whole_row(trial: Path, shared: bool) -> CheckResult:
  """Whether renames replace a file, flushed folders work, and a lock keeps others out."""
  problems = []
  target = trial / "renamed"
  paths.write(target, "old")
  with open(target) as old:
    paths.write(target, "new")
    if old.read() != "old" or paths.read(target) != b"new":
      problems.append("A rename does not replace an open file: checkpoints could be torn.")
  if not _locks(trial / "lock"):
    problems.append(
      "A lock does not keep another process out: two runs could share a workdir unseen. Mount it "
      "with locks (NFS: without nolock and local_lock)."
    )
  text = "renames replace, locks hold" if not problems else "renames or locks fail"
  if shared:
    text += " (tried on this machine only)"
  return check_result("whole files", text, problems, bad=True)


def _locks(path: Path) -> bool:
  with open(path, "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    other = subprocess.run([sys.executable, "-c", _TRY_LOCK, path], check=False)
  return other.returncode == 1


def clock_skew(folder: Path) -> float:
  """Seconds by which the clock of a file system is ahead of this machine's."""
  file, before = folder / "clock", time.time()
  file.write_text("now")
  after = time.time()
  stamp = os.stat(file).st_mtime  # given by the file system, not by this machine
  return max(stamp - after, 0.0) or min(stamp - before, 0.0)


def clock_row(skew: float) -> CheckResult:
  """Whether this machine's clock is that of the file system."""
  text = f"within {SKEW_SECS:.0f} s of the file system's"
  if abs(skew) <= SKEW_SECS:
    return CheckResult("clock", text)
  text = f"the file system's is {abs(skew):,.1f} s {'ahead' if skew > 0 else 'behind'}"
  return CheckResult(
    "clock", text, CheckVerdict.ADVICE,
    "Times in the logs of several machines do not fit: set the clocks (chrony, ntpd). A run does "
    "not depend on them.",
  )  # fmt: skip


def _store_rows(workdir: Path) -> list[CheckResult]:
  trial = workdir / f".check_env.{secrets.token_hex(4)}"
  data = os.urandom(STORE_BYTES)
  try:
    start = time.perf_counter()
    paths.write(trial / "speed", data)
    wrote = time.perf_counter() - start
    same = paths.read(trial / "speed") == data
    took = time.perf_counter() - start - wrote
    claims = _refuses_second(trial / "claim")
  finally:
    for name in paths.files(trial):
      (trial / name).unlink()
  mb = STORE_BYTES / 1e6
  text = f"{workdir}: writes {mb / wrote:,.0f} MB/s, reads {mb / took:,.0f} MB/s (one object)"
  lost = ["What was written was not read back."] if not same else []
  problems = []
  if not claims:
    problems.append(
      "The store writes where it was told not to: of two runs that begin in one workdir at once, "
      "the later one takes it, and the other ends within 10 s."
    )
  locks = "refuses" if claims else "ignores"
  return [
    check_result("workdir", text, lost, bad=True),
    check_result("claims", f"the store {locks} a write to what must not be there", problems),
  ]


def _refuses_second(path: Path) -> bool:
  paths.create(path, "first")
  try:
    paths.create(path, "second")
  except FileExistsError:
    return paths.read(path) == b"first"
  return False
