"""Entry points as a user runs them: their output and their exit code.

`called` is for what a command says and leaves behind: all such commands share one process, which
has its libraries and its compiled programs ready. `forked` and `started` give each a process of its
own: where exit codes, signals, permissions or the variables of the environment are the subject.
"""

import atexit
import ctypes
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from program_cache import user_cache
from xla_flags import QUICK

from ats_jax.exits import DONE, REFUSED
from ats_jax.verbs import VERBS

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECS = 480  # as of `runs`
# Linux lets root read and write what it has no permission for, by two of its capabilities.
ROOT_MAY_DO_ANYTHING = os.geteuid() == 0 and sys.platform != "linux"

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


def forked(
  module: str, *flags: str, prepare: Callable[[], None] | None = None, **env: str
) -> Result:
  """`python -m module flags`, in a process of its own that need not import jax again.

  A `module` that ends in .py is a script. `prepare` is called in the process before.
  """
  with tempfile.TemporaryDirectory() as folder:
    process = _FORKSERVER.Process(target=_child, args=(module, flags, env, folder, prepare))
    process.start()
    process.join(TIMEOUT_SECS)
    if process.exitcode is None:
      process.kill()
    out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
    return Result(process.exitcode, out, err)


def called(*words: str) -> Result:
  """`ats-jax words` in the process that runs all such commands, one after another.

  It has one device. A config or an extension that a command loads stays for the commands after it.
  """
  with tempfile.TemporaryDirectory() as folder:
    process, connection = _shell()
    connection.send((words, folder))
    try:
      assert connection.poll(TIMEOUT_SECS), f"ats-jax {' '.join(words)} does not end"
      code = connection.recv()
    except (AssertionError, EOFError):
      process.kill()
      process.join()
      _shell.cache_clear()
      code = process.exitcode
    out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
    return Result(code, out, err)


@functools.cache
def _shell() -> tuple[multiprocessing.process.BaseProcess, multiprocessing.connection.Connection]:
  """The process of `called`, and the connection to it."""
  ours, its = multiprocessing.Pipe()
  process = _FORKSERVER.Process(target=_run_commands, args=(its,))
  process.start()
  its.close()
  atexit.register(ours.close)  # which ends it; before multiprocessing waits for that
  return process, ours


def _run_commands(connection: multiprocessing.connection.Connection) -> None:
  """Run each command that comes, with new standard streams, and send its exit code."""
  os.environ["XLA_FLAGS"] = QUICK
  os.environ["XDG_CACHE_HOME"] = str(user_cache(Path(os.environ["XDG_CACHE_HOME"], "called")))
  streams = {number: os.dup(number) for number in (1, 2)}
  while True:
    try:
      words, folder = connection.recv()
    except EOFError:  # the tests are over
      return
    os.chdir(REPOSITORY)
    _redirect(folder)
    code = _run_command(words)
    sys.stdout.flush()
    sys.stderr.flush()
    for number, stream in streams.items():
      os.dup2(stream, number)
    connection.send(code)


def _run_command(words: tuple[str, ...]) -> int:
  """Run a command whose flags have their defaults again; return its exit code."""
  verbs = [sys.modules[name] for verb in VERBS if (name := f"ats_jax.verbs.{verb}") in sys.modules]
  for command in itertools.chain.from_iterable(verb.COMMANDS.values() for verb in verbs):
    command.flags.unparse_flags()
  sys.argv = ["ats_jax", *words]
  try:
    runpy.run_module("ats_jax", run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if isinstance(end.code, str):
      print(end.code, file=sys.stderr)
    return DONE if end.code is None else end.code if isinstance(end.code, int) else 1
  except BaseException:  # as Python does at the end of a process: the next command goes on
    traceback.print_exc()
    return 1
  return DONE


def _redirect(folder: str) -> None:
  """Let what is printed go to two files of a folder."""
  for number, name in ((1, "out"), (2, "err")):
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)


def _child(
  module: str,
  flags: tuple[str, ...],
  env: dict[str, str],
  folder: str,
  prepare: Callable[[], None] | None,
) -> None:
  _redirect(folder)
  if prepare:
    prepare()
  os.environ.update({"XLA_FLAGS": QUICK, **env})
  os.chdir(REPOSITORY)
  sys.argv = [module, *flags]
  if module.endswith(".py"):
    runpy.run_path(module, run_name="__main__")
  else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def drop_privileges() -> None:
  """Take from this process what root may do with files of no permission; it stays their owner."""
  if os.geteuid() != 0:
    return
  libc = ctypes.CDLL(None, use_errno=True)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, this thread
  sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then those above 31
  override_and_read_search = 1 << 1 | 1 << 2
  if libc.capget(header, sets):
    raise OSError(ctypes.get_errno(), "capget")
  for i in range(3):
    sets[i] &= ~override_and_read_search
  if libc.capset(header, sets):
    raise OSError(ctypes.get_errno(), "capset")


def started(module: str, *flags: str, **env: str) -> Result:
  """`python -m module flags` from the very start."""
  done = subprocess.run(
    [sys.executable, "-m", module, *flags],
    capture_output=True,
    text=True,
    timeout=TIMEOUT_SECS,
    cwd=REPOSITORY,
    env={**os.environ, "XLA_FLAGS": QUICK, **env},
  )
  return Result(done.returncode, done.stdout, done.stderr)
