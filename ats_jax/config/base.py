"""The ConfigDict that config files edit: schema.py's defaults, with types locked."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from ats_jax.config.schema import Config


def to_dict(cfg: Any) -> dict[str, Any]:
  """Return a (nested) config dataclass as a plain nested dict."""
  return dataclasses.asdict(cfg)


def base_config() -> ConfigDict:
  """Return every setting at its default; assigning an unknown name or a wrong type raises."""
  return ConfigDict(to_dict(Config()))
