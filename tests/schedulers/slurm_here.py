"""A Slurm of one node: its own controller, daemon, ports and folders; nothing of the system's."""

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from processes import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
TIMEOUT_SECS = 240
# A job that is queued again waits until its first credential has expired: two minutes otherwise.
CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
  """A cluster that is up.

  Attributes:
    env: with which its commands find it.
  """

  def __init__(self, config: Path):
    self.env = {**os.environ, "SLURM_CONF": str(config)}

  def tell(self, *command: str) -> str:
    """Run one of its commands; what it prints."""
    done = subprocess.run(
      command, env=self.env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout

  def job(self, number: str) -> dict[str, str]:
    """What it knows of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", self.tell("scontrol", "show", "job", number)))

  def wait(self, number: str, *states: str) -> dict[str, str]:
    """Wait until a job is in one of some states."""
    end = time.monotonic() + TIMEOUT_SECS
    while (job := self.job(number))["JobState"] not in states:
      assert time.monotonic() < end, job
      time.sleep(0.2)
    return job

  def wait_for_requeue(self, number: str) -> None:
    """Wait until a job has been queued again, and has nodes again."""
    end = time.monotonic() + TIMEOUT_SECS
    while (job := self.job(number))["Restarts"] == "0" or job["JobState"] == "PENDING":
      assert time.monotonic() < end, job
      time.sleep(0.2)


def is_installed() -> bool:
  return all(map(shutil.which, PROGRAMS))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
  """Start a cluster, and end it and all of its jobs."""
  for name in ("state", "spool"):
    (folder / name).mkdir(parents=True)
  config, host = folder / "slurm.conf", socket.gethostname().partition(".")[0]
  values = {"host": host, "user": getpass.getuser(), "folder": folder}
  config.write_text(CONFIG.format(controller=free_port(), daemon=free_port(), **values))
  slurm = Slurm(config)
  with contextlib.ExitStack() as stack:
    for name in ("slurmctld", "slurmd"):
      log = stack.enter_context((folder / f"{name}.out").open("w"))
      command = [shutil.which(name) or name, "-D", "-f", str(config)]
      process = subprocess.Popen(command, stdout=log, stderr=log, env=slurm.env)
      stack.callback(process.wait, 30)
      stack.callback(process.terminate)
    _wait_for_node(slurm, folder)
    stack.callback(_end_jobs, slurm)
    yield slurm


def _wait_for_node(slurm: Slurm, folder: Path) -> None:
  end = time.monotonic() + 30
  while "idle" not in (said := _try(slurm, "sinfo", "--noheader", "--format=%T")):
    if time.monotonic() > end:
      logs = "\n".join(p.read_text(errors="replace")[-2000:] for p in folder.glob("*.log"))
      raise AssertionError(f"the node is {said or 'not there'}\n{logs}")
    time.sleep(0.1)


def _end_jobs(slurm: Slurm) -> None:
  numbers = slurm.tell("squeue", "--noheader", "--format=%i").split()
  for number in numbers:
    _try(slurm, "scancel", "--signal=KILL", "--full", number)
    _try(slurm, "scancel", number)
  end = time.monotonic() + 30
  while numbers and slurm.tell("squeue", "--noheader") and time.monotonic() < end:
    time.sleep(0.2)


def _try(slurm: Slurm, *command: str) -> str:
  """What a command prints; "" while the controller does not answer yet."""
  done = subprocess.run(
    command, env=slurm.env, capture_output=True, text=True, check=False, timeout=60
  )
  return done.stdout.strip()
