"""Several processes on this machine that live and die together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from ats_jax.exits import DONE, LEFT, REFUSED, STOPPED

POLL_SECS = 0.05
# A process that is ending closes its connections first: another may see that, and end before it.
CONNECT_SECS = 5  # to reach a port of this machine
BLAME_SECS = 3.0


class Job:
  """Processes that live and die together.

  Attributes:
    processes: the running processes, by rank.
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
    while code not in (DONE, REFUSED, STOPPED) and self.told is None:
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
    """Start all, and wait for all to end in good order, or for one to fail; its code."""
    began = time.monotonic()
    self._start()
    rank, code = self._wait()
    self._end()
    if code not in (DONE, STOPPED):
      end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
      say(f"process {rank} {end} after {time.monotonic() - began:.0f} s")
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
    """Rank and code of the process that ends the job, or of the first if all end in good order.

    Of several failures it is the one that refused, or else one that was not left alone by another.
    """
    until = float("inf")  # somebody is to blame for what was seen
    while True:
      codes = [process.poll() for process in self.processes]
      ended = [(code, rank) for rank, code in enumerate(codes) if code not in (None, DONE, STOPPED)]
      if failed := [(code != REFUSED, code == LEFT, code, rank) for code, rank in ended]:
        *_, code, rank = min(failed)
        until = min(until, time.monotonic() + BLAME_SECS)
        if code != LEFT or None not in codes or time.monotonic() > until:
          return rank, code
      elif None not in codes:
        return 0, max(code for code in codes if code is not None)
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
  """A port at which processes of this machine reach one another.

  Raises:
    ValueError: if they cannot, which no restart mends.
  """
  try:
    with socket.create_server(("127.0.0.1", 0)) as s:
      port = s.getsockname()[1]
      socket.create_connection(("127.0.0.1", port), timeout=CONNECT_SECS).close()
      return port
  except OSError as e:
    raise ValueError(
      f"the processes of this machine cannot reach one another at 127.0.0.1: {e.strerror or e}. "
      "Bring up its loopback interface (`ip link set lo up`)."
    ) from e
