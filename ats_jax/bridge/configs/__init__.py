"""Config files of other trainers, read into settings of ours. A file a format.

`read` finds out what a file is; `table` says what became of each name in it; `source` is the config
file of ours. Nothing in a file is run.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from ats_jax.bridge.configs import deepspeed, huggingface, registry, torchtitan
from ats_jax.bridge.configs.foreign import Found, Line
from ats_jax.config.build import settings as known_settings
from ats_jax.config.build import with_settings
from ats_jax.config.schema import Config

KNOWN = (
  "a config.json of a Hugging Face model, a DeepSpeed JSON, torchtitan's TOML, or its "
  "config_registry.py with a function after a colon"
)
WIDEST = 60  # characters of a value of theirs that the table shows


def read(name: str) -> Found:
  """Read a file of another trainer, whose settings are then known to be valid.

  Args:
    name: the file; for a Python file with a function after a colon.

  Raises:
    ValueError: for a file that cannot be read or is of no known format, or settings that this
      program refuses.
  """
  file, _, function = name.partition(":")
  path = Path(file)
  try:
    found = _read(path, function)
    with_settings(Config(), found.settings)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
  return found


def _read(path: Path, function: str) -> Found:
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"cannot be read as text: {error}") from error
  if path.suffix == ".py":
    if not registry.is_registry(text):
      raise ValueError(f"is no config registry of torchtitan. What can be read: {KNOWN}.")
    return torchtitan.read_python(text, function, path)
  if function:
    raise ValueError(f"only a Python file has functions, so what is {function!r}?")
  values = _parse(path, text)
  if not isinstance(values, dict):
    raise ValueError(f"is no object of names and values. What can be read: {KNOWN}.")
  if path.suffix == ".toml":
    if torchtitan.is_toml(values):
      return torchtitan.read_toml(values)
  elif huggingface.is_model(values):
    return huggingface.read(values, path)
  elif deepspeed.is_deepspeed(values):
    return deepspeed.read(values)
  names = ", ".join(list(values)[:8])
  raise ValueError(f"is of no known format (it has {names}). What can be read: {KNOWN}.")


def _parse(path: Path, text: str) -> Any:
  if path.suffix not in (".json", ".toml"):
    raise ValueError(f"ends in neither .json, .toml nor .py. What can be read: {KNOWN}.")
  try:
    return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
  except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
    raise ValueError(f"is no {path.suffix[1:].upper()}: {error}") from error


def table(found: Found) -> str:
  """What became of each name, in Markdown that reads as text."""
  parts = [
    ("taken", found.taken),
    ("NOT supported or not understood", found.missing),
    ("left out there, where defaults differ: theirs is taken", found.defaults),
    ("nothing to take: so it is here, or it does not bear on training", found.same),
  ]
  lines = [f"{found.kind}: {len(found.values)} names"]
  for title, rows in parts:
    if rows:
      width = max(len(_theirs(row)) for row in rows)
      lines += ["", f"{title} ({len(rows)})"]
      lines += [f"  {_theirs(row):<{width}}  {row.text}" for row in rows]
  return "\n".join([*lines, "", *found.notes])


def _theirs(line: Line) -> str:
  value = repr(line.value)
  return f"{line.name} = {value if len(value) <= WIDEST else value[: WIDEST - 3] + '...'}"


def source(found: Found, name: str, target: str) -> str:
  """A config file of ours.

  Args:
    found: what the other file says.
    name: that file, as the user named it.
    target: where this one will be.
  """
  plain = lambda text: _printable(text).replace("\\", "/").replace('"""', "'''")
  head = [
    f'"""From {plain(name)} ({found.kind}).',
    "",
    f"Command: python -m ats_jax train --config={plain(target)} --workdir=runs/imported \\\\",
    "  --config.data.paths=TEXT",
  ]
  if found.missing:
    head += ["", "Not supported, or not understood:"]
    head += [f"  {plain(_theirs(line))}: {plain(line.text)}" for line in found.missing]
  body = ["from ats_jax.config import base_config", "", "", "def get_config():"]
  body.append("  config = base_config()")
  order = [setting for setting in known_settings() if setting in found.settings]
  body += [
    f"  config.{setting} = {_typed(setting, found.settings[setting])!r}" for setting in order
  ]
  return "\n".join([*head, '"""', "", *body, "  return config", ""])


def _printable(text: str) -> str:
  return "".join(c if c.isprintable() else " " for c in text)


def _typed(setting: str, value: Any) -> Any:
  """A whole number as a float where the setting is one."""
  return float(value) if known_settings()[setting].type is float else value
