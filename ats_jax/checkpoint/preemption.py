"""Stopping a run in good order when it is told to: Ctrl-C, SLURM, Kubernetes, spot instances."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils

# `make`, `uv run` and `srun` pass on a signal that the terminal or scheduler sent to the whole
# group: the same request reaches the process twice within milliseconds.
ECHO_SECS = 0.5
# Steps between checks whether another process received a signal.
POLL_STEPS = 10


class StopSignal:
  """Turns the first SIGTERM or SIGINT into a flag that the training loop polls.

  A second signal, half a second later or more, ends the process at once with status 128 + signal.
  A context manager; the handlers found on entry are put back on exit. In another thread than the
  main one, which alone may handle signals, it never sees one.

  Attributes:
    requested: name of the signal received ("SIGTERM"), or None.
  """

  def __init__(self):
    self.requested: str | None = None
    self._time = 0.0
    self._tells = True
    self._previous = {}

  def __enter__(self) -> Self:
    self._tells = jax.process_index() == 0  # a scheduler signals all: one line is enough
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exc: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def agreed(self, step: int) -> str | None:
    """Return the signal that any process of the job received, or None: the same on all processes.

    Schedulers do not signal all processes at the same step, yet all must save the same one. In a
    multi-process job this is a small collective at every 10th step (it waits for the device); call
    it on all processes after each step.
    """
    if jax.process_count() == 1:
      return self.requested
    if step % POLL_STEPS:
      return None
    number = signal.Signals[self.requested].value if self.requested else 0
    number = int(np.max(multihost_utils.process_allgather(np.int32(number))))
    return signal.Signals(number).name if number else None

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    now = time.monotonic()
    if self.requested is None:
      self.requested, self._time = signal.Signals(number).name, now
      # os.write, because the signal may have come in the middle of a print.
      message = "finishing the step and saving; press Ctrl-C again to exit at once"
      if self._tells:
        os.write(2, f"\n{self.requested}: {message}\n".encode())
    elif now - self._time >= ECHO_SECS:
      os._exit(128 + number)
