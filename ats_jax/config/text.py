"""Values of settings as text, for flags: lists with commas, tables of name=value.

Spaces around an entry are left out; line ends are not, as a text may begin with them.

A dataclass that is one of several kinds is its name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from ats_jax.config.names import KINDS, all_settings, flatten, is_section, settings
from ats_jax.config.schema.setting import Kinds, Table

_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def parse(name: str, text: Any, values: Mapping[str, Any]) -> Any:
  """The value of a setting of its type; what is no text is returned as it is.

  Args:
    name: of the setting.
    text: `a,b` of a list, `a=1,b=2` of a table; of a table of lists `a=1,a=2`.
    values: a nested config, which says of which kinds the sections are.

  Raises:
    ValueError: if it is not of the setting's type.
  """
  if not isinstance(text, str) or name in KINDS:
    return text
  field = settings(flatten(values)).get(name) or all_settings()[name][0].field
  return parse_as(field.type, text, name)


def parse_as(kind: Any, text: str, name: str) -> Any:
  """The value of a type that a text stands for.

  Raises:
    ValueError: if it stands for none; `name` is the setting's.
  """
  if is_section(kind):
    if dataclasses.fields(kind)[0].name == Kinds.TAG:
      return text  # the name of a kind, whose options are at their defaults
    raise ValueError(
      f"--config.{name}: there is no text for a {kind.__name__}. Set {name} in a config file."
    )
  if get_origin(kind) is tuple:
    return tuple(parse_as(get_args(kind)[0], part, name) for part in _parts(text))
  if get_origin(kind) is Table:
    return _table(get_args(kind)[0], text, name)
  try:
    return _BOOLS[text.lower()] if kind is bool else kind(text)
  except (KeyError, ValueError):
    raise ValueError(f"--config.{name}: {text!r} is no {kind.__name__}.") from None


def text_of(value: Any) -> str:
  """The text that `parse_as` turns into a value; of elements that are a kind, their names."""
  if isinstance(value, Mapping):
    return ",".join(f"{key}={text_of(one)}" for key, one in value.items())
  if isinstance(value, tuple):
    return ",".join(map(text_of, value))
  if dataclasses.is_dataclass(value):
    return str(getattr(value, Kinds.TAG))
  return str(value).lower() if isinstance(value, bool) else str(value)


def _table(kind: Any, text: str, name: str) -> Table:
  table: Table = Table()
  for part in _parts(text):
    key, equals, value = (word.strip() for word in part.partition("="))
    if not (key and equals):
      raise ValueError(f"--config.{name}: {part!r} is not name=value, as in a=1,b=2.")
    parsed = parse_as(kind, value, name)
    if key in table and get_origin(kind) is not tuple:
      raise ValueError(f"--config.{name}={text} names {key} twice. Leave one of them out.")
    table[key] = table[key] + parsed if key in table else parsed
  return table


def _parts(text: str) -> list[str]:
  return [part for part in (part.strip(" ") for part in text.split(",")) if part]
