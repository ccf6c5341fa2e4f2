"""What `data.filters` says: which filters, in which order, with which options."""

from typing import NamedTuple

CHANGES = ("repair", "c4")  # these may make another text of a document
FILTERS = ("repair", "exact", "near", "language", "gopher", "repetition", "c4")


class Stage(NamedTuple):
  """One filter.

  Attributes:
    name: one of FILTERS.
    options: as (name, value), sorted by name.
  """

  name: str
  options: tuple[tuple[str, str], ...] = ()

  def __str__(self) -> str:
    return ":".join([self.name, *(f"{name}={value}" for name, value in self.options)])


def filter_stages(text: str) -> tuple[Stage, ...]:
  """`exact,near:threshold=0.7` -> the filters in order.

  Which options a filter has is known where it is made.

  Raises:
    ValueError: for an unknown filter, one that is named twice, or an option that is not name=value.
  """
  found: list[Stage] = []
  for entry in filter(None, map(str.strip, text.split(","))):
    name, *options = (part.strip() for part in entry.split(":"))
    if name not in FILTERS:
      raise ValueError(f"data.filters: {name!r} is unknown. Choose from: {', '.join(FILTERS)}.")
    if name in (stage.name for stage in found):
      raise ValueError(f"data.filters={text!r} names {name} twice. Leave one of them.")
    values: dict[str, str] = {}
    for option in options:
      key, equals, value = (part.strip() for part in option.partition("="))
      if not (key and equals and value):
        raise ValueError(
          f"data.filters: {option!r} in {entry!r} is not option=value, as in near:threshold=0.7."
        )
      if key in values:
        raise ValueError(f"data.filters: {entry!r} gives {key} twice. Leave one of them.")
      values[key] = value
    found.append(Stage(name, tuple(sorted(values.items()))))
  return tuple(found)


def canonical(text: str) -> str:
  """`data.filters` in one spelling.

  Raises:
    ValueError: as `filter_stages`.
  """
  return ",".join(map(str, filter_stages(text)))
