"""Entry points as a user runs them: a real process for each, its output and its exit code."""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from xla_flags import QUICK

from ats_jax.exits import REFUSED

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECS = 300
# Linux lets root read and write what it has no permission for: two capabilities less, and it may
# not, though it is still the owner of its files and of this Python.
_DROP_CAPABILITIES = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
  if ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[1], sys.argv[1:])
"""
UNPRIVILEGED = (sys.executable, "-c", _DROP_CAPABILITIES) if os.geteuid() == 0 else ()

# Its processes are forked from one that has imported the libraries: 0.2 s each instead of 3 s.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["ats_jax.train.run", "ats_jax.inference.load"])


class Result(NamedTuple):
  """How a process ended."""

  code: int | None
  out: str
  err: str

  def error(self) -> str:
    """The message with which it refused its input: one, on stderr, without a traceback."""
    assert "Traceback" not in self.out + self.err, self.err
    return self.last_error()

  def last_error(self) -> str:
    """The same, where a library may have printed a traceback before it."""
    assert self.code == REFUSED, self
    _, message = re.split("^error: ", self.err, flags=re.MULTILINE)
    return message


def train_flags(
  workdir: Path, *settings: str, config: str | Path = "configs/debug.py"
) -> list[str]:
  """Flags of a training with a config file and some settings changed ("name=value")."""
  return [f"--config={config}", f"--workdir={workdir}", *(f"--config.{s}" for s in settings)]


def forked(module: str, *flags: str, **env: str) -> Result:
  """`python -m module flags`, in a process of its own that need not import jax again.

  A `module` that ends in .py is a script.
  """
  with tempfile.TemporaryDirectory() as folder:
    process = _FORKSERVER.Process(target=_child, args=(module, flags, env, folder))
    process.start()
    process.join(TIMEOUT_SECS)
    if process.exitcode is None:
      process.kill()
    out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
    return Result(process.exitcode, out, err)


def _child(module: str, flags: tuple[str, ...], env: dict[str, str], folder: str) -> None:
  for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
  os.environ.update({"XLA_FLAGS": QUICK, **env})
  os.chdir(REPOSITORY)
  sys.argv = [module, *flags]
  if module.endswith(".py"):
    runpy.run_path(module, run_name="__main__")
  else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def started(module: str, *flags: str, prefix: tuple[str, ...] = (), **env: str) -> Result:
  """`python -m module flags` from the very start; `prefix` is a command that runs this one."""
  done = subprocess.run(
    [*prefix, sys.executable, "-m", module, *flags],
    capture_output=True,
    text=True,
    timeout=TIMEOUT_SECS,
    cwd=REPOSITORY,
    env={**os.environ, "XLA_FLAGS": QUICK, **env},
  )
  return Result(done.returncode, done.stdout, done.stderr)
