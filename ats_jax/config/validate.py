"""The general rules: ranges, and settings without effect; then each section's own (`check`)."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ats_jax import extensions
from ats_jax.config.names import default_of, flatten, settings, unmet
from ats_jax.config.schema import Config
from ats_jax.config.schema.rules import format_bound
from ats_jax.config.schema.setting import Checked, Condition, Kinds, LengthChecked, Table, elements


def validate(cfg: Config) -> Config:
  """Return `cfg` unchanged if every rule holds.

  Raises:
    ValueError: naming the setting, its value, what was expected and what to change.
  """
  _ranges(cfg, "", extensible=_has_unloaded(cfg))
  _effects(cfg)
  for section in _sections(cfg):
    if isinstance(section, Checked):
      section.check(cfg)
    # Where num_steps follows from the data, `count_epochs` checks these rules once it is known.
    if isinstance(section, LengthChecked) and not cfg.counts_epochs:
      section.check_length(cfg)
  return cfg


def _sections(section: Any) -> Iterator[Any]:
  """A section and those within it."""
  yield section
  for field in dataclasses.fields(section):
    for inner in elements(getattr(section, field.name)):
      if dataclasses.is_dataclass(inner):
        yield from _sections(inner)


def _effects(cfg: Config) -> None:
  """Refuse a setting that cannot have an effect: one whose condition does not hold."""
  flat, fields = flatten(cfg), settings(cfg)
  for name, field in fields.items():
    default = default_of(name, field)
    if flat[name] != default and (needs := unmet(name, fields, flat)):
      raise ValueError(_idle(name, needs, flat, f"leave {name} at {default!r}"))


def check_given(
  cfg: Config, given: Iterable[str], stored: Callable[[], Mapping[str, Any]] = dict
) -> None:
  """Refuse settings that a user gave and that have no effect with the others.

  0, "", false and the default ask for nothing, so that they are not ignored.

  Args:
    cfg: the run.
    given: dotted names of the settings that flags set.
    stored: returns the flat settings of the run that this one goes on with, if any: the command
      that began it is not refused.

  Raises:
    ValueError: as `validate`.
  """
  flat, fields = flatten(cfg), settings(cfg)
  for name in given:
    if name not in fields or flat[name] in (0, "", default_of(name, fields[name])):
      continue
    needs = unmet(name, fields, flat, by_flag=True)
    if needs is not None and stored().get(name) != flat[name]:
      raise ValueError(_idle(name, needs, flat, f"leave {name} out"))


def _idle(name: str, needs: Condition, flat: Mapping[str, Any], otherwise: str) -> str:
  value = flat[needs.setting] or repr(flat[needs.setting])  # '' shows that it is empty
  return (
    f"{name}={flat[name]} does nothing with {needs.setting}={value}: it needs {needs.words}. "
    f"Set that, or {otherwise}."
  )


def _has_unloaded(cfg: Config) -> bool:
  """Whether a name that nobody knows may be one of an extension that has not been loaded."""
  return not extensions.are_loaded(cfg.extensions)


def _ranges(section: Any, path: str, *, extensible: bool) -> None:
  for field in dataclasses.fields(section):
    value, name, meta = getattr(section, field.name), path + field.name, field.metadata
    for place, one in _places(value):
      if dataclasses.is_dataclass(one):
        kind = getattr(one, Kinds.TAG, "") if place else ""
        _ranges(one, f"{name}{place}{kind and f' ({kind})'}.", extensible=extensible)
      else:
        _range(one, name + place, meta, extensible=extensible)


def _places(value: Any) -> Iterator[tuple[str, Any]]:
  """The elements of a list or a table, each with its place in brackets; or the one value."""
  if isinstance(value, Table):
    yield from ((f"[{key!r}]", one) for key, one in value.items())
  elif isinstance(value, tuple):
    yield from ((f"[{number}]", one) for number, one in enumerate(value))
  else:
    yield "", value


def _range(value: Any, name: str, meta: Mapping[str, Any], *, extensible: bool) -> None:
  choices = meta["choices"]
  if isinstance(choices, extensions.Registry | Kinds):
    if value not in choices and not extensible:
      raise ValueError(choices.unknown(value))
  elif choices and value not in choices:
    raise ValueError(f"{name}={value!r} is unknown. Choose one of: {', '.join(choices)}.")
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f"{name}={value} is not a finite number ({meta['doc']}).")
  if meta["low"] is not None and value < meta["low"]:
    least = format_bound(meta["low"])
    raise ValueError(f"{name}={value} is too small: at least {least} ({meta['doc']}).")
  if meta["high"] is not None and value > meta["high"]:
    most = format_bound(meta["high"])
    raise ValueError(f"{name}={value} is too large: at most {most} ({meta['doc']}).")
