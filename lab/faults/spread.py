"""A suite's runs over many processes of one core each."""

import os
import subprocess
import sys
import time
from pathlib import Path

from absl import logging

from lab.faults.results import Results
from lab.faults.suite import part_file

REPORT_SECS, POLL_SECS = 60.0, 1.0
# With more than one thread a process, they wait for each other.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def spread(path: Path, processes: int) -> None:
  """Run this command in so many processes, each a part of what is missing; merge what they made.

  Args:
    path: of the results. Parts are in files beside it until all is done; those that an earlier
      call left are merged first.
    processes: how many.

  Raises:
    ValueError: if one of them fails; what the others made is kept.
  """
  merge_parts(path)
  cores = sorted(os.sched_getaffinity(0))
  running = [_start(path, part, processes, cores[part % len(cores)]) for part in range(processes)]
  try:
    _wait(path, running)
  finally:
    for process in running:
      if process.poll() is None:
        process.terminate()
        process.wait()
    merge_parts(path)
  failed = [str(i) for i, process in enumerate(running) if process.returncode]
  if failed:
    raise ValueError(
      f"parts {', '.join(failed)} of {processes} failed: see {_log(path, int(failed[0]))}. What "
      "was made is kept; the same command makes the rest."
    )


def _wait(path: Path, running: list[subprocess.Popen]) -> None:
  said = time.monotonic()
  while any(process.poll() is None for process in running):
    time.sleep(POLL_SECS)
    if time.monotonic() - said > REPORT_SECS:
      said = time.monotonic()
      logging.info("%d runs are done", sum(_lines(part) for part in _parts(path)))


def _start(path: Path, part: int, parts: int, core: int) -> subprocess.Popen:
  own = [arg for arg in sys.argv[1:] if not arg.startswith("--processes")]
  command = [sys.executable, "-m", "lab.faults", *own, f"--part={part}/{parts}"]
  log = _log(path, part)
  log.parent.mkdir(parents=True, exist_ok=True)
  flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
  env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
  with log.open("w") as file:
    return subprocess.Popen(
      ["taskset", "--cpu-list", str(core), *command],
      env=os.environ | env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
    )  # fmt: skip


def merge_parts(path: Path) -> None:
  """Move the runs of all parts into the file of the results."""
  for part in _parts(path):
    Results(path).take(part)


def _parts(path: Path) -> list[Path]:
  return sorted(found for found in path.parent.glob(f"{path.name}.part*") if found.suffix != ".log")


def _log(path: Path, part: int) -> Path:
  file = part_file(path, part)
  return file.with_name(f"{file.name}.log")


def _lines(path: Path) -> int:
  return path.read_text(encoding="utf-8").count("\n")
