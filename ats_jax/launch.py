"""Train with several processes on this machine; when one dies, all start again.

python -m ats_jax launch --processes=2 --config=configs/debug.py --workdir=runs/debug [...]

Each is `python -m ats_jax train` with the other flags as they are, and on a machine with GPUs each
has one of its own. What one process loses, all lose: they are ended and started together, and go
on from the newest good checkpoint. A run that ended by itself, well or with an error that starting
again does not mend, is not started again; its exit code is passed on. SIGINT and SIGTERM are passed
to all processes, which save and end.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

REFUSED = 2  # exit code after an error that names its cause: the same command ends the same way
POLL_SECS = 0.05


class Job:
  """Processes that live and die together.

  Attributes:
    processes: those running, by rank.
    told: the first signal that was passed on to them, or None; after one, nothing starts again.
  """

  def __init__(self, command: Sequence[str], size: int):
    """Set the command of each of `size` processes; nothing is started yet."""
    self.processes: list[subprocess.Popen] = []
    self.told: int | None = None
    self._command, self._size = command, size

  def run(self, restarts: int) -> int:
    """Run to the end, starting again up to `restarts` times; the exit code of the run."""
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._pass_on)
    code, restart = self._once(), 0
    while code not in (0, REFUSED) and self.told is None:
      if restart == restarts:
        say(f"giving up after {restarts} restarts")
        break
      restart += 1
      say(
        f"starting all {self._size} again, from the newest checkpoint: restart {restart} of "
        f"{restarts}"
      )
      code = self._once()
    return code if code >= 0 else 128 - code

  def _once(self) -> int:
    """Start all, and wait for all to end well, or for one to fail; its code."""
    began = time.monotonic()
    self._start()
    rank, code = self._wait()
    self._end()
    if code:
      how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
      say(f"process {rank} {how} after {time.monotonic() - began:.0f} s")
    return code

  def _start(self) -> None:
    address = f"localhost:{_free_port()}"
    for rank in range(self._size):
      job = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(self._size),
        "JAX_PROCESS_ID": str(rank),
        "JAX_LOCAL_DEVICE_IDS": str(rank),  # of GPUs; a CPU is shared
      }
      # In a session of its own, so that loader processes end with it, and a Ctrl-C comes once.
      process = subprocess.Popen(self._command, env=os.environ | job, start_new_session=True)
      self.processes.append(process)
    if self.told is not None:  # while they were started
      self._pass_on(self.told, None)

  def _wait(self) -> tuple[int, int]:
    """Rank and code of the process that fails first; (0, 0) if all end well."""
    while True:
      codes = [process.poll() for process in self.processes]
      if failed := [(code != REFUSED, code, rank) for rank, code in enumerate(codes) if code]:
        # Of several failures, name the process that refused or was killed, not those that failed
        # because it was gone.
        _, code, rank = min(failed)
        return rank, code
      if None not in codes:
        return 0, 0
      time.sleep(POLL_SECS)

  def _end(self) -> None:
    """Kill what is left; a checkpoint is complete or absent whenever that happens."""
    for process in self.processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    self.processes.clear()

  def _pass_on(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.told = self.told or number
    for process in self.processes:
      if process.poll() is None:
        process.send_signal(number)


def say(text: str) -> None:
  """A line of the launcher's own."""
  print(f"{time.strftime('%H:%M:%S')} launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def main(argv: Sequence[str] | None = None) -> int:
  """Run the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m ats_jax launch",
    description="Train with several processes on this machine; when one dies, all start again.",
    epilog="All other flags go to `train`.",
    allow_abbrev=False,
  )
  parser.add_argument("--processes", type=_count, required=True, help="how many, e.g. 2")
  parser.add_argument("--restarts", type=int, default=5, help="at most so many (default 5)")
  own, flags = parser.parse_known_args(argv)
  command = [sys.executable, "-m", "ats_jax.train", *flags]
  return Job(command, own.processes).run(own.restarts)


def _count(text: str) -> int:
  if (number := int(text)) < 1:
    raise argparse.ArgumentTypeError(f"{number}; there must be one process or more")
  return number


if __name__ == "__main__":
  sys.exit(main())
