"""The launcher with small programs of its own: who is started again, what is passed on."""

import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from ats_jax.cluster.launch import local
from ats_jax.exits import LEFT, REFUSED, STOPPED

LAUNCH = """
import sys
from ats_jax.cluster.launch import local
local.BLAME_SECS = 0.2 if sys.argv[2] == "alone" else 60.0
sys.exit(local.Job([sys.executable, "-c", sys.argv[1]], 2).run(restarts=2))
"""
# Counts its starts in a file; `rank` and `start` are there for what follows.
BEGIN = """
import os, signal, sys
rank = int(os.environ["JAX_PROCESS_ID"])
with open(f"starts_{rank}", "a") as file:
  file.write("x")
start = os.path.getsize(f"starts_{rank}")
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
"""
# What the handler of a signal does is done at once, whenever the signal comes.
WAIT = "\nwhile True: os.read(woken, 1)"
# Process 1 waits until process 0 is there, and then until it has ended.
AFTER_THE_OTHER = """
if rank == 0:
  alive = open("alive", "w")
else:
  open("alive").read()
"""


def launch(program, folder, blame=""):
  os.mkfifo(folder / "alive")
  return subprocess.Popen(
    [sys.executable, "-c", LAUNCH, BEGIN + program, blame],
    cwd=folder,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def starts(folder, rank):
  return (folder / f"starts_{rank}").stat().st_size


def test_all_start_again_when_one_is_killed(tmp_path):
  program = f"""
if (rank, start) == (0, 1):
  open("alive").read()
  os.kill(os.getpid(), signal.SIGKILL)
if start == 1:
  open("alive", "w").close(){WAIT.replace(chr(10), chr(10) + "  ")}
"""
  job = launch(program, tmp_path)
  _, err = job.communicate(timeout=60)
  assert job.returncode == 0 and starts(tmp_path, 0) == starts(tmp_path, 1) == 2
  assert "launch: process 0 was killed by SIGKILL after" in err
  assert "starting all 2 again, from the newest checkpoint: restart 1 of 2" in err


@pytest.mark.parametrize(
  ("program", "code", "count", "says"),
  [
    ("os.abort()", 128 + signal.SIGABRT, 3, "giving up after 2 restarts"),
    (f"sys.exit({REFUSED})", REFUSED, 1, f"ended with code {REFUSED}"),
  ],
)
def test_restarts_are_bounded_and_the_code_is_passed_on(program, code, count, says, tmp_path):
  job = launch(f"if rank == 0: {program}{WAIT}", tmp_path)
  _, err = job.communicate(timeout=30)
  assert job.returncode == code and starts(tmp_path, 0) == count
  assert says in err


@pytest.mark.parametrize(
  ("other", "blame", "code", "says"),
  [
    ("sys.exit(7)", "", 7, "process 1 ended with code 7"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "", 137, "process 1 was killed by"),
    (WAIT, "alone", LEFT, f"process 0 ended with code {LEFT}"),
  ],
)
def test_the_one_that_was_left_alone_is_named_only_if_no_other_ends(
  other, blame, code, says, tmp_path
):
  """A process may see that another ends before the launcher does."""
  program = f"{AFTER_THE_OTHER}\nif rank == 0: sys.exit({LEFT})\n{other}"
  job = launch(program, tmp_path, blame)
  _, err = job.communicate(timeout=60)
  assert job.returncode == code and err.count(f"launch: {says}") == 3
  assert starts(tmp_path, 0) == starts(tmp_path, 1) == 3


@pytest.mark.parametrize(
  ("number", "saved"), [(signal.SIGTERM, 0), (signal.SIGINT, STOPPED), (signal.SIGTERM, 9)]
)
def test_a_signal_reaches_all_and_nothing_starts_again(number, saved, tmp_path):
  handle = f"""
def stop(number, frame):
  open(f"got_{{rank}}_{{number}}", "w").close()
  sys.exit({saved})
signal.signal({int(number)}, stop)
os.write(1, b"ready\\n")
"""
  job = launch(handle + WAIT, tmp_path)
  assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
  job.send_signal(number)
  job.communicate(timeout=60)
  assert job.returncode == saved and starts(tmp_path, 0) == starts(tmp_path, 1) == 1
  if saved != 9:  # else the first that fails ends the other
    assert all((tmp_path / f"got_{rank}_{int(number)}").exists() for rank in (0, 1))


def test_what_a_process_started_ends_with_it(tmp_path):
  child = "import subprocess; p = subprocess.Popen(['tail', '-f', '/dev/null'])\n"
  note = "open(f'child_{rank}', 'w').write(str(p.pid))\n"
  die = "if rank == 0: sys.exit(2)"
  job = launch(child + note + die + WAIT, tmp_path)
  job.communicate(timeout=30)  # would wait for who holds stderr
  assert job.returncode == REFUSED


def test_a_run_that_was_stopped_and_saved_is_not_started_again(tmp_path):
  """One process says so after the other: nobody is ended before it has saved."""
  save = "open(f'saved_{rank}', 'w').close()\n"
  job = launch(f"{AFTER_THE_OTHER}{save}sys.exit({STOPPED})", tmp_path)
  _, err = job.communicate(timeout=30)
  assert job.returncode == STOPPED and starts(tmp_path, 0) == starts(tmp_path, 1) == 1
  assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
  assert "launch:" not in err


@pytest.mark.parametrize("does", ["create_server", "create_connection"])
def test_a_machine_without_loopback_is_said_before_anything_starts(does, monkeypatch):
  def refuse(*args, **kwargs):
    raise OSError(errno.ENETUNREACH, "Network is unreachable")

  monkeypatch.setattr(socket, does, refuse)
  job = local.Job([sys.executable, "-c", ""], 2)
  with pytest.raises(
    ValueError, match=r"127\.0\.0\.1: Network is unreachable\. .*`ip link set lo up`"
  ):
    job._start()
  assert not job.processes
