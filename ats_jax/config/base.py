"""The ConfigDict that config files edit: the schema's defaults, each with its type."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from ats_jax.config.schema import Config


def to_dict(cfg: Any) -> dict[str, Any]:
  """Return a (nested) config dataclass as a plain nested dict."""
  return dataclasses.asdict(cfg)


def base_config() -> ConfigDict:
  """Return every setting at its default.

  Assigning a wrong type raises at once; an unknown name is refused by `from_config_dict`, which
  can say what was meant.
  """
  return ConfigDict(to_dict(Config()))
