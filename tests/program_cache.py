"""Where the tests' compiled programs are kept: the next session finds those that are the same.

jax's key has the program, the compiler's version and its flags, so an edit of the code needs no
clearing. Processes that a test starts, and may kill while they write, have a cache of the session's
own instead.
"""

import contextlib
import os
import shutil
import zlib
from collections import Counter
from pathlib import Path

import pytest

MAX_BYTES = 2**30  # of some thousand programs, 10 kB each; then all are removed


def kept_programs() -> Path:
  """The folder for this kind of processor: machine code of another may not run here."""
  base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
  folder = base / "ats_jax_tests" / _processor()
  if sum(p.stat().st_size for p in folder.glob("*")) > MAX_BYTES:
    shutil.rmtree(folder)
  return folder


def user_cache(folder: Path) -> Path:
  """A folder for XDG_CACHE_HOME in which runs find, and leave, the kept programs.

  Not for processes that are killed: one that is cut while it is written is of no use to the next.
  """
  kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])  # conftest.py sets it
  for parent in (kept, folder / "ats_jax"):
    parent.mkdir(parents=True, exist_ok=True)
  with contextlib.suppress(FileExistsError):  # of another process
    (folder / "ats_jax" / "xla").symlink_to(kept)
  return folder


def _processor() -> str:
  info = Path("/proc/cpuinfo")  # Linux's; elsewhere a home belongs to one machine
  lines = info.read_text().splitlines() if info.exists() else []
  names = ("model name", "flags", "Features")
  return f"{zlib.crc32(str(sorted({x for x in lines if x.startswith(names)})).encode()):08x}"


EVENTS = {
  "/jax/compilation_cache/cache_hits": "found",
  "/jax/compilation_cache/cache_misses": "compiled",
}


class ProgramCounter:
  """A plugin that says how many programs of all processes of pytest the cache had."""

  def __init__(self):
    self._counts = Counter[str]()

  def pytest_sessionstart(self):
    from jax import monitoring  # here: the environment is set before jax is imported

    monitoring.register_event_listener(self._count)

  def _count(self, event: str, **_):
    if event in EVENTS:
      self._counts[EVENTS[event]] += 1

  def pytest_sessionfinish(self, session):
    if hasattr(session.config, "workeroutput"):  # a worker of xdist, which tells the one that sums
      session.config.workeroutput["programs"] = dict(self._counts)

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node):
    self._counts.update(getattr(node, "workeroutput", {}).get("programs", {}))

  def pytest_terminal_summary(self, terminalreporter):
    if number := self._counts.total():
      found = self._counts["found"]
      terminalreporter.write_line(f"compiled programs: {found} of {number} found in the cache")
