"""A process that an experiment starts: what it prints and when, and its end with all it started."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]


class Child:
  """A process, what it prints, and when.

  Attributes:
    began: its start; all times are those of `time.time`.
    lines: what it and those that it started have printed, each line with its time.
    process: the process.
  """

  def __init__(self, command: Sequence[str], env: Mapping[str, str]):
    """Start it in the repository, with the environment that there is and `env`."""
    path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    self.began, self.lines = time.time(), list[tuple[float, str]]()
    self.process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      errors="replace", cwd=REPOSITORY, env={**os.environ, **more, **env},
      start_new_session=True,
    )  # fmt: skip
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    assert self.process.stdout is not None
    for line in self.process.stdout:
      self.lines.append((time.time(), line.rstrip("\n")))

  @property
  def runs(self) -> bool:
    """Whether it has not ended yet, or there is more to read."""
    return self.process.poll() is None or self._reader.is_alive()

  def text(self, *, without: str = "(?!)") -> str:
    """All that it printed, but lines that begin like a pattern."""
    return "\n".join(line for _, line in self.lines if not re.match(without, line))

  def when(self, pattern: str, until: float, after: float = 0.0) -> tuple[float, str]:
    """Wait for a line that matches and came after a time; its time and text."""
    seen = 0
    while True:
      running, lines = self.runs, self.lines[seen:]
      for at, line in lines:
        if at > after and re.search(pattern, line):
          return at, line
      seen += len(lines)
      if not running:
        raise ChildProcessError(f"it ended, with {self.process.poll()}, before {pattern!r} came")
      if time.time() > until:
        raise TimeoutError(f"no line like {pattern!r} came in time")
      time.sleep(0.02)

  def go_on(self) -> None:
    """Give it the line that it waits for."""
    assert self.process.stdin is not None
    self.process.stdin.write("\n")
    self.process.stdin.flush()

  def ended(self, until: float) -> int:
    """Wait for its end; its exit code."""
    while self.runs:
      if time.time() > until:
        raise TimeoutError("it did not end in time")
      time.sleep(0.02)
    return self.process.wait()

  def rank(self, number: int) -> int:
    """The id of a process that `ats-jax launch local` started."""
    for child in psutil.Process(self.process.pid).children():
      if child.environ().get("JAX_PROCESS_ID") == str(number):
        return child.pid
    raise ChildProcessError(f"there is no process {number}")

  def end(self) -> None:
    """Kill it and all that it started; those of a launcher are in sessions of their own."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGSTOP)  # or it starts more
      family = psutil.Process(self.process.pid).children(recursive=True)
      self.process.kill()
      for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
          one.kill()
      psutil.wait_procs(family, timeout=10)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
      self.process.wait(timeout=10)
    self._reader.join(timeout=2)
