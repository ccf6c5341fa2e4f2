"""One process at a time: a lock of the system, or on a store an object that its holder rewrites."""

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from absl import logging

from ats_jax.exits import REFUSED
from ats_jax.store import paths
from ats_jax.store.paths import Path

# On a store the holder rewrites its lock every BEAT_SECS. A lock that is not rewritten for
# DEAD_SECS belongs to a dead process. No clocks are compared: whoever wants the lock watches it for
# that long.
BEAT_SECS = 10.0
DEAD_SECS = 40.0
LOOK_SECS = 0.1  # far longer than `is_held` has a local lock


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
  """Hold the lock `path`.

  Locally the system releases it when the process ends, however it ends. On a store the next process
  finds the object of a dead one and waits `DEAD_SECS`. If two processes wait for the same dead one,
  both may pass; then the one whose object was replaced ends within `BEAT_SECS`.

  Raises:
    BlockingIOError: if another process holds it.
  """
  if not paths.is_remote(path):
    with open(path, "a") as file:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        time.sleep(LOOK_SECS)  # perhaps `is_held` looked in this moment
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      yield
    return
  lease = _Lease(path)
  lease.take()
  try:
    yield
  finally:
    lease.release()


def is_held(path: Path) -> bool:
  """Whether a process holds the lock `path`; nothing is written.

  On a store the object of a holder is watched until it is rewritten, that of a dead one for
  `DEAD_SECS`.
  """
  if not paths.is_remote(path):
    if not path.exists():
      return False
    with open(path) as file:
      try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
      except BlockingIOError:
        return True
    return False
  before, deadline = _read(path), time.monotonic() + DEAD_SECS
  while before is not None and time.monotonic() < deadline:
    time.sleep(BEAT_SECS / 10)
    if (now := _read(path)) != before:
      return now is not None
  return False


def _read(path: Path) -> str | None:
  """What the lock of a store says; None = there is none."""
  try:
    return paths.read(path).decode()
  except FileNotFoundError:
    return None


class _Lease:
  """A lock on a store."""

  def __init__(self, path: Path):
    self._path, self._count = path, 0
    self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

  def take(self) -> None:
    """Write the object, if nobody does, and go on doing so."""
    if (holder := _read(self._path)) is not None:
      self._see_it_die(holder)
    try:
      paths.create(self._path, self._text())
    except FileExistsError:
      raise BlockingIOError(f"{self._path} was taken in this moment") from None
    if not self._mine():
      raise BlockingIOError(f"{self._path} was taken in this moment")
    self._thread.start()

  def release(self) -> None:
    """Delete the object."""
    self._over.set()
    self._thread.join()  # after which nobody rewrites it
    if self._mine():
      self._path.unlink()

  def _see_it_die(self, holder: str) -> None:
    """Return when the object is gone: deleted by its holder, or dead and deleted here."""
    logging.info("%s is that of %s; waiting to see whether it lives", self._path, holder)
    deadline = time.monotonic() + DEAD_SECS
    dead = False
    while not dead:
      time.sleep(BEAT_SECS / 4)
      dead = time.monotonic() >= deadline
      now = _read(self._path)  # before it is deleted too: another one may just have taken it
      if now is None:
        return
      if now != holder:
        raise BlockingIOError(f"{self._path} is held by {now}")
    self._path.unlink(missing_ok=True)

  def _beat(self) -> None:
    while not self._over.wait(BEAT_SECS):
      try:
        self._renew()
      except paths.errors() as e:  # of the network: the next time may go well
        logging.warning("%s was not renewed: %s", self._path, paths.reason(e))

  def _renew(self) -> None:
    if self._mine():
      self._count += 1
      paths.write(self._path, self._text())
      return
    logging.error(
      "another process has taken %s from this one, which ends: two would damage its files.",
      self._path.parent,
    )
    os._exit(REFUSED)  # without saving: what the other one writes stays whole

  def _mine(self) -> bool:
    return (_read(self._path) or "").startswith(f"{self._owner} ")

  def _text(self) -> str:
    return f"{self._owner} {self._count}"
