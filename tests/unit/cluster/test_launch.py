"""The launcher with small programs of its own: who is started again, what is passed on."""

import signal
import subprocess
import sys
import time

import pytest

from ats_jax.exits import LEFT, REFUSED, STOPPED

LAUNCH = """
import sys
from ats_jax.cluster.launch.local import Job
sys.exit(Job([sys.executable, "-c", sys.argv[1]], 2).run(restarts=2))
"""
# Counts its starts in a file; `rank` and `start` are there for what follows.
BEGIN = """
import os, signal, sys, time
rank = int(os.environ["JAX_PROCESS_ID"])
with open(f"starts_{rank}", "a") as file:
  file.write("x")
start = os.path.getsize(f"starts_{rank}")
"""
# In short sleeps: one that begins just after a signal came would not be cut short by it.
WAIT = "\nfor _ in range(1200): time.sleep(0.05)"


def launch(program, folder):
  return subprocess.Popen(
    [sys.executable, "-c", LAUNCH, BEGIN + program],
    cwd=folder,
    stderr=subprocess.PIPE,
    text=True,
  )


def starts(folder, rank):
  return (folder / f"starts_{rank}").stat().st_size


def test_all_start_again_when_one_is_killed(tmp_path):
  program = """
if (rank, start) == (1, 1):
  while not (os.path.exists("starts_0") and os.path.getsize("starts_0")):
    time.sleep(0.02)
  os.kill(os.getpid(), signal.SIGKILL)
if start == 1:
  time.sleep(60)
"""
  job = launch(program, tmp_path)
  _, err = job.communicate(timeout=30)
  assert job.returncode == 0 and starts(tmp_path, 0) == starts(tmp_path, 1) == 2
  assert "launch: process 1 was killed by SIGKILL after" in err
  assert "starting all 2 again, from the newest checkpoint: restart 1 of 2" in err


@pytest.mark.parametrize(
  ("program", "code", "count", "says"),
  [
    ("sys.exit(7)", 7, 3, "giving up after 2 restarts"),
    ("os.abort()", 128 + signal.SIGABRT, 3, "was killed by SIGABRT"),
    (f"sys.exit({REFUSED})", REFUSED, 1, f"ended with code {REFUSED}"),
  ],
)
def test_restarts_are_bounded_and_the_code_is_passed_on(program, code, count, says, tmp_path):
  job = launch(f"if rank == 0: {program}{WAIT}", tmp_path)
  _, err = job.communicate(timeout=30)
  assert job.returncode == code and starts(tmp_path, 0) == count
  assert says in err


@pytest.mark.parametrize(
  ("other", "code", "says"),
  [
    ("time.sleep(0.5); sys.exit(7)", 7, "process 1 ended with code 7"),
    ("time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 was killed by"),
    ("time.sleep(60)", LEFT, f"process 0 ended with code {LEFT}"),
  ],
)
def test_the_one_that_was_left_alone_is_named_only_if_no_other_ends(other, code, says, tmp_path):
  """A process may see that another ends before the launcher does."""
  job = launch(f"if rank == 0: sys.exit({LEFT})\n{other}", tmp_path)
  _, err = job.communicate(timeout=60)
  assert job.returncode == code and err.count(f"launch: {says}") == 3
  assert starts(tmp_path, 0) == starts(tmp_path, 1) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("saved", [0, STOPPED, 9])
def test_a_signal_reaches_all_and_nothing_starts_again(number, saved, tmp_path):
  handle = f"""
def stop(number, frame):
  open(f"got_{{rank}}_{{number}}", "w").close()
  sys.exit({saved})
signal.signal({int(number)}, stop)
open(f"ready_{{rank}}", "w").close()
"""
  job = launch(handle + WAIT, tmp_path)
  while not all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)):
    assert job.poll() is None
    time.sleep(0.02)
  job.send_signal(number)
  job.communicate(timeout=30)
  assert job.returncode == saved and starts(tmp_path, 0) == starts(tmp_path, 1) == 1
  if saved != 9:  # else the first that fails ends the other
    assert all((tmp_path / f"got_{rank}_{int(number)}").exists() for rank in (0, 1))


def test_what_a_process_started_ends_with_it(tmp_path):
  child = "import subprocess; p = subprocess.Popen(['sleep', '60'])\n"
  note = "open(f'child_{rank}', 'w').write(str(p.pid))\n"
  die = "if rank == 0: sys.exit(2)"
  job = launch(child + note + die + WAIT, tmp_path)
  job.communicate(timeout=30)  # would wait for who holds stderr
  assert job.returncode == REFUSED


def test_a_run_that_was_stopped_and_saved_is_not_started_again(tmp_path):
  """One process says so after the other: nobody is ended before it has saved."""
  save = "time.sleep(rank * 0.5); open(f'saved_{rank}', 'w').close()\n"
  job = launch(f"{save}sys.exit({STOPPED})", tmp_path)
  _, err = job.communicate(timeout=30)
  assert job.returncode == STOPPED and starts(tmp_path, 0) == starts(tmp_path, 1) == 1
  assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
  assert "launch:" not in err
