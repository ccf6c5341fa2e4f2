"""What a run logs, kept in its workdir: log.txt, and log.N.txt of each further process."""

import contextlib
import logging as std_logging
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from absl import logging

from ats_jax.config.schema.log import LogConfig
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.store.secrets import MaskingFormatter

FORMAT = MaskingFormatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")


def file_name(process: int) -> str:
  """Of the log of a process."""
  return f"log.{process}.txt" if process else "log.txt"


@contextlib.contextmanager
def verbosity(cfg: LogConfig) -> Iterator[None]:
  """Within it, lines less severe than `cfg.level` are left out, on the screen and in the file."""
  before = logging.get_verbosity()
  loggers = (std_logging.getLogger(), logging.get_absl_logger())
  levels = [logger.level for logger in loggers]  # absl's is "not set" until its verbosity is set
  logging.set_verbosity(cfg.level)
  try:
    yield
  finally:
    logging.set_verbosity(before)
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)


@contextlib.contextmanager
def log_to_file(folder: Path, process: int) -> Iterator[None]:
  """Within it, what the process logs goes to its file in `folder` too, behind what is there.

  The error that ends a run is the last line. What libraries of a further process write to standard
  error by themselves goes to the file only: process 0 says the same, and when that dies, the
  coordination service fills a page for each process that is left.
  """
  path = folder / file_name(process)
  handler = _FileHandler(path)
  std_logging.root.addHandler(handler)
  with contextlib.ExitStack() as stack:
    stack.callback(handler.close)
    stack.callback(std_logging.root.removeHandler, handler)
    stack.push(handler.take_error)
    if process and not paths.is_remote(path):
      stack.enter_context(_native_errors_to(path))
    yield


@contextlib.contextmanager
def _native_errors_to(path: Path) -> Iterator[None]:
  """Standard error is the end of `path`, but for what Python writes there."""
  shown, screen = logging.get_absl_handler().python_handler, sys.stderr
  with os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace") as real:
    with open(path, "ab") as file:
      os.dup2(file.fileno(), 2)
    sys.stderr = real
    shown.setStream(real)
    try:
      yield
    finally:
      os.dup2(real.fileno(), 2)
      sys.stderr = screen
      shown.setStream(screen)


class _FileHandler(std_logging.Handler):
  """A line for each record; of libraries, what the screen has of them."""

  def __init__(self, path: Path):
    content = paths.read_log(path) if path.exists() else b""
    torn = content and not content.endswith(b"\n")  # a kill in the middle of a line
    self._log = paths.Log(path, content + b"\n" if torn else content)
    super().__init__()  # last: what it registers for the exit closes the log
    self.setFormatter(FORMAT)
    for shown in logging.get_absl_handler().filters:
      self.addFilter(shown)

  def emit(self, record: std_logging.LogRecord) -> None:
    try:
      self._log.write(f"{self.format(record)}\n".encode())
    except paths.errors():  # a full disk: the run's own files say so, and end it
      self.handleError(record)

  def take_error(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    """The screen gets it from who catches it."""
    del trace
    if kind is not None:
      record = std_logging.LogRecord(
        __name__, std_logging.ERROR, __file__, 0, "the run ended: %s: %s", (kind.__name__, error),
        None,
      )  # fmt: skip
      self.emit(record)

  def close(self) -> None:
    super().close()
    try:
      self._log.close()
    except paths.errors():
      return  # said when the line was written
