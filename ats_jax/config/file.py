"""A config by its name: a file whose `get_config` is run, a packaged file, or a preset."""

import contextlib
import difflib
import os
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from ats_jax.config.presets import PRESETS, preset

_PACKAGE = Path(__file__).parents[1]
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


def packaged() -> dict[str, Path]:
  """The config files that come with the package, by name: "debug" -> the file.

  A wheel has them in `ats_jax/_data/configs`; a checkout has them in `configs/`, beside `ats_jax/`.
  """
  of_wheel = _PACKAGE / "_data" / "configs"
  folder = of_wheel if of_wheel.is_dir() else _PACKAGE.parent / "configs"
  return {path.stem: path for path in sorted(folder.glob("*.py"))}


def load_file(name: str) -> ConfigDict:
  """Load `file.py`, `file.py:variant`, a packaged file (`debug:moe`) or a preset (`b7:moe`).

  Args:
    name: a file, or the name of a packaged file or a preset; a file of that name wins. After a
      colon comes the variant, which `get_config` gets; without a colon it gets nothing.

  Raises:
    ValueError: if there is no such file, name or variant, or the file cannot be read, or something
      in it fails (names the line), or it has no `get_config` that returns a ConfigDict.
  """
  name, *variant = name.split(":", 1)
  if not name:
    raise ValueError("the name of the file is empty. Example: configs/debug.py, or debug")
  if name in PRESETS and not Path(name).is_file():
    return preset(name, *variant)
  file = _find(name)
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


def _find(name: str) -> str:
  """The file that a name stands for. A file that exists wins; a name with / or .py is a file's."""
  path, files = Path(name), packaged()
  if path.is_file():
    return name
  if name in files:
    return str(files[name])
  known = [*files, *PRESETS]
  seen = f"(seen from {os.getcwd()})"
  if path.is_dir():
    raise ValueError(f"{name} is a folder {seen}. Name a config file in it, or a packaged config.")
  if path.suffix == ".py" or len(path.parts) > 1:
    if path.exists() or path.stem not in known:
      return name
    raise ValueError(f"no file {name} {seen}. Did you mean the packaged config {path.stem}?")
  near = difflib.get_close_matches(name, known, n=1)
  hint = f"Did you mean {near[0]}? " if near else ""
  raise ValueError(
    f"no file and no packaged config {name!r} {seen}. {hint}Packaged are {', '.join(known)}."
  )


def _place(file: str, error: BaseException) -> str:
  """The file with the number of the last of its lines that was running."""
  if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
    return f"{file}:{error.lineno}"
  frames = traceback.extract_tb(error.__traceback__)
  numbers = [frame.lineno for frame in frames if frame.filename == file]
  return f"{file}:{numbers[-1]}" if numbers else file
