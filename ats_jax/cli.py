"""The command line: flags that entry points share, and errors of users without a traceback."""

import contextlib
import difflib
import errno
import logging as std_logging
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from ats_jax.config.build import explain, settings
from ats_jax.config.file import load_file
from ats_jax.launch import REFUSED

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# `--help` shows a flag with the entry point that asked for it. Several entry points may be imported
# into one process, hence allow_override.
flags.disclaim_key_flags()


def define_config_flag() -> flags.FlagHolder:
  """Define `--config`, with overrides `--config.section.name=value`."""
  holder = config_flags.DEFINE_config_file(
    "config",
    None,
    "Config file, e.g. configs/debug.py; a variant follows a colon. Behind it, "
    "--config.section.name=value changes a setting, e.g. --config.optimizer.learning_rate=1e-3; "
    "`python -m ats_jax train --explain=optimizer` lists a section's.",
    allow_override=True,
  )
  flags.FLAGS["config"].parser = _ConfigFileParser("config")
  return holder


class _ConfigFileParser(config_flags.ConfigFileFlagParser):
  """Says in a line what is wrong with a config file; its base class gives tracebacks."""

  def parse(self, path: str) -> ConfigDict:
    """Load `file.py` or `file.py:variant`; no setting can be added to it afterwards."""
    return load_file(path).lock()


def define_workdir_flag() -> flags.FlagHolder:
  """Define `--workdir`."""
  return flags.DEFINE_string(
    "workdir", None, "Folder of the run, e.g. runs/debug.", allow_override=True
  )


def define_step_flag() -> flags.FlagHolder:
  """Define `--step`."""
  return flags.DEFINE_string(
    "step", "latest", "Checkpoint: a step, 'latest' or 'best'.", allow_override=True
  )


def run(main: Any, commands: tuple[str, ...] = (), *, operand: str = "") -> None:
  """Run `main(argv)` under absl, with short log lines and user errors without a traceback.

  Args:
    main: gets the arguments that are no flags.
    commands: one of these words must be among the flags, if there are any; "" = or none of them.
    operand: what the one argument is that is no flag, e.g. "workdir"; "" = there is none.
  """

  def guarded(argv: list[str]) -> int | None:
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(std_logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(_shorten)
    with contextlib.ExitStack() as stack:
      stack.push(_leave_job)
      stack.enter_context(_user_errors())
      return main(argv)

  app.run(guarded, flags_parser=lambda argv: _parse_flags(argv, commands, operand))


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
  try:
    yield
  except (ValueError, FloatingPointError) as error:
    if _shows_tracebacks():
      raise
    print(f"error: {error}\n(ATS_TRACEBACK=1 shows where.)", file=sys.stderr)
    raise SystemExit(REFUSED) from None
  except OSError as error:
    if error.errno not in _DISK_FULL or _shows_tracebacks():
      raise
    print(
      f"error: a file could not be written: {error}. Free space on the disk, then start the same "
      "command again: it goes on from the newest checkpoint.",
      file=sys.stderr,
    )
    raise SystemExit(REFUSED) from None
  except KeyboardInterrupt:  # before or after the steps, which finish first (StopSignal)
    print("interrupted", file=sys.stderr)
    raise SystemExit(128 + signal.SIGINT) from None


def _leave_job(
  kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
  """After an error, end a process of a job at once.

  At exit jax would wait for the other processes, and those wait for what this one does not compute.
  """
  if kind is None or error is None or not jax.distributed.is_initialized():
    return
  if not isinstance(error, SystemExit):
    sys.excepthook(kind, error, trace)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


@_user_errors()
def _parse_flags(argv: list[str], commands: tuple[str, ...] = (), operand: str = "") -> list[str]:
  """Parse the command line; a wrong setting is said with what it means."""
  overrides = [m[1] for arg in argv[1:] if (m := re.match(r"--?(?:no)?config\.([^=]+)", arg))]
  for name in overrides:
    if name not in settings():
      near = difflib.get_close_matches(name, settings(), n=1)
      hint = f"Did you mean --config.{near[0]}?" if near else "--explain=model lists a section."
      raise ValueError(f"--config.{name}: there is no such setting. {hint}")
  if overrides and "config" in flags.FLAGS:
    require(any(re.match(r"--?config(=|$)", arg) for arg in argv), "config", "configs/debug.py")
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as e:
    wrong = [explain(name) for name in set(overrides) if f"--config.{name}=" in str(e)]
    raise ValueError("\n".join([str(e), *wrong])) from e
  for flag in (flags.FLAGS[name] for name in flags.FLAGS):
    if flag.present and isinstance(flag.value, float) and not math.isfinite(flag.value):
      raise ValueError(f"--{flag.name}={flag.value} is not a finite number: {flag.help}")
  if commands:
    if " ".join(rest[1:]) not in commands:
      words = ", ".join(word or "none" for word in commands)
      raise ValueError(f"expected one command of {words}, got {rest[1:]}.")
  elif operand:
    if len(rest) != 2:
      raise ValueError(f"expected one {operand}, got {rest[1:]}.")
  elif rest[1:]:
    raise ValueError(
      f"unexpected argument {rest[1]!r}. Everything is a flag: --name=value (see --help)."
    )
  return rest


def _shorten(record: std_logging.LogRecord) -> bool:
  """Keep warnings of libraries (Orbax, jax), without tracebacks: they precede an error of ours.

  With `log.level=debug` all is kept.
  """
  if f"{os.sep}ats_jax{os.sep}" in record.pathname or logging.get_verbosity() >= logging.DEBUG:
    return True
  if not _shows_tracebacks():
    record.exc_info = None
  return record.levelno >= std_logging.WARNING


def _shows_tracebacks() -> bool:
  return bool(os.environ.get("ATS_TRACEBACK"))


def require(value: Any, flag: str, example: str) -> Any:
  """Return `value`; if the flag was not given, say so and how."""
  if not value:
    raise ValueError(f"--{flag} is missing. Example: --{flag}={example}")
  return value
