"""What rules of several sections are made of: bounds by another setting, and their words."""

import operator
from typing import Any

from ats_jax.store import paths


def divides(cfg: Any, divisor: str, multiple: str, advice: str) -> None:
  """Refuse two settings, by dotted name, of which the first does not divide the second."""
  ways, size = operator.attrgetter(divisor, multiple)(cfg)
  if size % ways:
    raise ValueError(f"{divisor}={ways} does not divide {multiple}={size}. {advice}")


def at_most(cfg: Any, name: str, limit: str, advice: str) -> None:
  """Refuse a setting that is larger than another one, both by dotted name."""
  value, most = operator.attrgetter(name, limit)(cfg)
  if value > most:
    raise ValueError(f"{name}={value} exceeds {limit}={most}{advice}")


def is_local(cfg: Any, name: str) -> None:
  """Refuse a folder on a store, by the dotted name of its setting."""
  value = operator.attrgetter(name)(cfg)
  if paths.is_remote(value):
    raise ValueError(f"{name}={value!r} is on a store. It must be local; a workdir need not be.")


def format_bound(bound: float) -> str:
  """An end of a range in words: whole numbers with all their digits."""
  return str(bound) if isinstance(bound, int) else f"{bound:g}"
