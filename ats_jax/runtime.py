"""What must be set before jax touches a device, and what every entry point does first."""

import collections
import contextlib
import difflib
import errno
import functools
import logging as std_logging
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from ats_jax.config.build import explain, settings
from ats_jax.config.file import load_file
from ats_jax.config.schema import Config
from ats_jax.launch import REFUSED

# Of the GPU's memory, what jax takes at its start; its own default leaves a quarter unused.
GPU_MEMORY_FRACTION = "0.92"

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
    "`python -m ats_jax.train --explain=optimizer` lists a section's.",
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
  """Keep warnings of libraries (Orbax, jax), without tracebacks: they precede an error of ours."""
  if f"{os.sep}ats_jax{os.sep}" in record.pathname:
    return True
  if not _shows_tracebacks():
    record.exc_info = None
  return record.levelno >= std_logging.WARNING


def _shows_tracebacks() -> bool:
  return bool(os.environ.get("ATS_TRACEBACK"))


def configure(cfg: Config) -> None:
  """Set compiler flags, memory and the compilation cache. Call before any device is used.

  Raises:
    ValueError: if the cache's folder cannot be made.
  """
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)
  if cfg.precision.deterministic:
    flag = "--xla_gpu_deterministic_ops=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
  jax.config.update("jax_enable_compilation_cache", cfg.compilation_cache != "off")
  if cfg.compilation_cache != "off":
    folder = cache_folder(cfg)
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise ValueError(
        f"the compilation cache {folder} cannot be made: {e.strerror}. Set XDG_CACHE_HOME or "
        "compilation_cache to a folder that can be written, or compilation_cache to 'off'."
      ) from e
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
  _count_cache_events()


def join_job(cfg: Config) -> None:
  """Become one of several processes that train together, if the environment says so.

  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID are set by `ats_jax.launch`, or by
  hand on each machine. Call before any device is used. The first process alone reports its steps;
  of the others, warnings are shown with their number.

  Raises:
    ValueError: if only some of the three are set.
  """
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  values = [os.environ.get(name) for name in names]
  if not any(values) or jax.distributed.is_initialized():  # `train` may be called more than once
    return
  address, size, rank = values
  if address is None or size is None or rank is None:
    missing = ", ".join(n for n, v in zip(names, values, strict=True) if v is None)
    raise ValueError(f"{missing} is not set, and the rest of {', '.join(names)} is. Set all three.")
  jax.distributed.initialize(
    address, int(size), int(rank), cluster_detection_method="deactivate",
    heartbeat_timeout_seconds=cfg.heartbeat_secs,
  )  # fmt: skip
  if int(rank):
    logging.set_verbosity(logging.WARNING)
    line = std_logging.Formatter(f"%(asctime)s [{rank}] %(message)s", "%H:%M:%S")
    logging.get_absl_handler().setFormatter(line)


def cache_folder(cfg: Config) -> Path:
  """Where compiled programs are kept."""
  if cfg.compilation_cache != "auto":
    return Path(cfg.compilation_cache).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(base).expanduser() / "ats_jax" / "xla"


def cache_use(cfg: Config) -> str:
  """Where the cache is, how large, and how often this process found a program in it."""
  if cfg.compilation_cache == "off":
    return "off"
  folder = cache_folder(cfg)
  size = sum(map(_file_size, folder.glob("*")))
  events = _count_cache_events()
  hits, misses = (events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses"))
  return f"{folder}, {size / 2**20:,.1f} MiB; {hits} programs found, {misses} added"


def _file_size(path: Path) -> int:
  try:
    return path.stat().st_size
  except FileNotFoundError:  # another process has just removed it
    return 0


@functools.cache
def _count_cache_events() -> collections.Counter[str]:
  """Events of jax in this process by name, from the first call on."""
  events = collections.Counter[str]()
  jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
  return events


def require(value: Any, flag: str, example: str) -> Any:
  """Return `value`; if the flag was not given, say so and how."""
  if not value:
    raise ValueError(f"--{flag} is missing. Example: --{flag}={example}")
  return value
