"""A config file: Python that is run for the ConfigDict that its `get_config` returns."""

import contextlib
import os
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

# What Python itself raises for a mistake in a program, and `sys.exit`. Not `KeyboardInterrupt`,
# and not the classes that a library or the file defines: those keep their traceback.
_MISTAKES = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  ImportError,
  LookupError,
  NameError,
  OSError,
  RuntimeError,
  StopIteration,
  SyntaxError,
  SystemExit,
  TypeError,
  ValueError,
)


def load_file(name: str) -> ConfigDict:
  """Run `file.py` or `file.py:variant`.

  Args:
    name: the file, and after a colon what `get_config` gets; without a colon it gets nothing.

  Returns:
    What `get_config` returned.

  Raises:
    ValueError: if the file cannot be read, or something in it fails (names the line), or it has no
      `get_config` that returns a ConfigDict.
  """
  file, *variant = name.split(":", 1)
  if not file:
    raise ValueError("the name of the file is empty. Example: configs/debug.py")
  try:
    source = Path(file).read_bytes()
  except OSError as error:
    raise ValueError(f"cannot be read, {error.strerror} (seen from {os.getcwd()})") from error
  module = run_file(file, source, "config_file")
  with _mistakes(file):
    config = module.get_config(*variant)
  if not isinstance(config, ConfigDict):
    raise ValueError(
      f"{file}: get_config() returned {config!r:.40}, not a ConfigDict. Start from base_config(), "
      "and end with `return config`."
    )
  return config


def run_file(file: str, source: bytes, name: str) -> types.ModuleType:
  """Run a user's file as the module `name`.

  Raises:
    ValueError: if something in it fails (names the line).
  """
  module = types.ModuleType(name)
  module.__file__ = file
  sys.modules[name] = module  # where dataclasses look for the types in a file
  with _mistakes(file):
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
  return module


@contextlib.contextmanager
def _mistakes(file: str) -> Iterator[None]:
  """Around what a user's file does: its mistakes become ValueErrors that name the line."""
  try:
    yield
  except _MISTAKES as error:
    raise ValueError(f"{_place(file, error)}: {type(error).__name__}: {error}") from error


def _place(file: str, error: BaseException) -> str:
  """The file with the number of the last of its lines that was running."""
  if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
    return f"{file}:{error.lineno}"
  frames = traceback.extract_tb(error.__traceback__)
  numbers = [frame.lineno for frame in frames if frame.filename == file]
  return f"{file}:{numbers[-1]}" if numbers else file
