"""Loading the user's files that `extensions` names, each known by its name and a hash of it.

Only what a user asks for is loaded: `train` and the commands that take a config do so, but no
command that is given a workdir, whose config may be somebody else's.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ats_jax import extensions
from ats_jax.config.build import extensions_of, from_config_dict
from ats_jax.config.file import run_file
from ats_jax.config.names import to_dict
from ats_jax.config.schema import Config
from ats_jax.extensions import MARK, loaded

SUFFIX = ".py"


def load_extensions(cfg: Config) -> Config:
  """Load what `cfg.extensions` names, and check `cfg` with the parts that it registers.

  A file is run once; again only if it has changed since, and then what it had registered is taken
  out first.

  Args:
    cfg: the run, as its user wrote it.

  Returns:
    `cfg` with the hash of each in `extensions`, `name#hash`: it is what a workdir keeps, so that a
    run that goes on with another file says so.

  Raises:
    ValueError: if one cannot be read or imported, fails, or registers a name that is taken; or the
      config breaks a rule.
  """
  return build(to_dict(cfg))


def build(values: Mapping[str, Any]) -> Config:
  """The config of nested values, whose extensions are loaded first: they may bring settings.

  Raises:
    ValueError: as `load_extensions` and `from_config_dict`.
  """
  return from_config_dict({**values, "extensions": load(extensions_of(values))})


def load(names: Iterable[str]) -> tuple[str, ...]:
  """Load files or modules; returns each with its hash, `name#hash`, as a workdir keeps it.

  Raises:
    ValueError: as `load_extensions`.
  """
  return tuple(map(_load, names))


def _load(entry: str) -> str:
  """Load `name` or `name#hash`; returns the latter."""
  name, _, known = entry.partition(MARK)
  if known and loaded.get(name) == known:
    return entry
  try:
    path = _path(name)
    source = path.read_bytes()
  except OSError as error:
    reason = f"{error.strerror} (seen from {Path.cwd()})"
    raise ValueError(f"extensions={name!r} cannot be read: {reason}.") from error
  found = hashlib.sha256(source).hexdigest()[:16]
  if loaded.get(name) == found:
    return f"{name}{MARK}{found}"
  if name in loaded:
    for registry in extensions.ALL:
      registry.forget(f"{name}{MARK}{loaded[name]}")
    del loaded[name]
  with extensions.owned_by(f"{name}{MARK}{found}"):
    try:
      run_file(str(path), source, f"ats_jax_extension_{found}")
    except ValueError as error:
      raise ValueError(f"extensions={name!r} cannot be loaded. {error}") from error
  loaded[name] = found
  return f"{name}{MARK}{found}"


def _path(name: str) -> Path:
  """The file of an entry: itself, or that of a module which Python can import."""
  if name.endswith(SUFFIX):
    return Path(name).expanduser()
  try:
    spec = importlib.util.find_spec(name)
  except (ImportError, ValueError) as error:
    raise ValueError(f"extensions={name!r}: no module can be imported by it ({error}).") from error
  if spec is None or spec.origin is None or not spec.origin.endswith(SUFFIX):
    raise ValueError(
      f"extensions={name!r} is neither a file that ends in {SUFFIX} nor a module that can be "
      "found. Example: --config.extensions=my_parts.py"
    )
  return Path(spec.origin)
