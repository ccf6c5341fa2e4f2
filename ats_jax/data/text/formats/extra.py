"""Modules that not every installation has."""

import importlib
from types import ModuleType


def import_extra(name: str, needed_by: str, extra: str = "formats") -> ModuleType:
  """Import a module of an extra.

  Args:
    name: name of the module.
    needed_by: the file, for the message.
    extra: the extra of this package that installs it.

  Raises:
    ValueError: if it is not installed.
  """
  try:
    return importlib.import_module(name)
  except ImportError as e:
    raise ValueError(
      f"{needed_by} needs {name}, which is not installed: pip install 'ats_jax[{extra}]'"
    ) from e
