"""What a config file of another trainer says, in settings of ours, and what it says beside them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ats_jax.config.build import settings as known_settings

REQUIRED = object()  # no default: the file must say it


@dataclasses.dataclass(frozen=True)
class Line:
  """One name of theirs and what became of it.

  Attributes:
    name: as in their file, dotted.
    value: as in their file.
    text: the setting of ours with its value, or why there is none.
  """

  name: str
  value: Any
  text: str


@dataclasses.dataclass
class Found:
  """A file of another trainer while it is read: each name in it is spoken of once.

  Attributes:
    kind: what file it is, in words.
    values: of the file by dotted name; lists are values.
    settings: of ours, by dotted name.
    taken: names that became settings.
    same: names whose value is what this model or this program does anyway, or that mean nothing
      for training.
    missing: names that are not supported or not understood.
    defaults: of theirs, for what the file leaves out, where ours would be another.
    notes: what to know before training.
  """

  kind: str
  values: dict[str, Any]
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  taken: list[Line] = dataclasses.field(default_factory=list)
  same: list[Line] = dataclasses.field(default_factory=list)
  missing: list[Line] = dataclasses.field(default_factory=list)
  defaults: list[Line] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)

  def get(self, name: str, default: Any = None) -> Any:
    """The value in the file; null counts as left out."""
    value = self.values.get(name)
    return default if value is None else value

  def whole(self, name: str, default: int) -> int:
    """The value in the file, which must be a whole number.

    Raises:
      ValueError: if it is none.
    """
    value = self.get(name, default)
    if type(value) is not int:
      raise ValueError(f"{self.kind}: {name}={value!r} is no whole number.")
    return value

  def take(
    self,
    name: str,
    ours: str,
    default: Any = REQUIRED,
    convert: Callable[[Any], Any] = lambda value: value,
  ) -> Any:
    """Make a name of theirs a setting of ours.

    Args:
      name: theirs.
      ours: dotted name of a setting.
      default: theirs, where the file leaves the name out or has null for it.
      convert: their value to ours.

    Returns:
      The setting's value.

    Raises:
      ValueError: if the file must say it and does not, or `convert` raises it.
    """
    value = self.get(name)
    if value is None and default is REQUIRED:
      raise ValueError(f"{self.kind}: {name} is missing, which says {ours}.")
    try:
      setting = convert(default if value is None else value)
    except (TypeError, ValueError, ArithmeticError) as error:
      raise ValueError(f"{self.kind}: {name}={value!r} is no value for {ours}: {error}") from error
    self.settings[ours] = setting
    usual = known_settings()[ours].default
    if value is not None:
      self.taken.append(Line(name, value, f"{ours} = {setting!r}"))
      return setting
    if name in self.values:
      self.same.append(Line(name, None, f"not said: {ours} = {setting!r}"))
    if setting != usual:
      self.defaults.append(Line(name, default, f"{ours} = {setting!r} (ours: {usual!r})"))
    return setting

  def give(self, name: str, ours: Mapping[str, Any], why: str = "") -> None:
    """Take a name as several settings, or as words only."""
    self.settings |= ours
    words = ", ".join(f"{setting} = {value!r}" for setting, value in ours.items())
    self.taken.append(
      Line(name, self.values.get(name), f"{words}{': ' if words and why else ''}{why}")
    )

  def expect(self, name: str, *usual: Any, what: str) -> None:
    """A name whose only values that this program has are `usual`; null counts as left out."""
    if name not in self.values:
      return
    value = self.values[name]
    if value is None or any(value == one and type(value) is type(one) for one in usual):
      self.same.append(Line(name, value, "so it is here"))
    else:
      self.lack(name, what)

  def ignore(self, why: str, *names: str) -> None:
    """Names that do not bear on training, but for those that were spoken of."""
    new = self.values.keys() & set(names) - self._spoken()
    self.same += [Line(name, self.values[name], why) for name in names if name in new]

  def lack(self, name: str, why: str) -> None:
    """A name that is understood, and that this program has nothing for."""
    self.missing.append(Line(name, self.values.get(name), why))

  def lack_all(self, why: str, *names: str) -> None:
    """Those of `names` that the file has and that are neither null, false, zero nor empty."""
    for name in names:
      if name in self.values:
        if self.values[name]:
          self.lack(name, why)
        else:
          self.same.append(Line(name, self.values[name], "not used"))

  def finish(self) -> "Found":
    """List every name that nobody spoke of as not understood."""
    spoken = self._spoken()
    for name, value in self.values.items():
      if name not in spoken:
        self.missing.append(Line(name, value, "not understood"))
    return self

  def _spoken(self) -> set[str]:
    return {line.name for line in (*self.taken, *self.same, *self.missing)}


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
  """Nested mappings by dotted name; an empty one stays a value."""
  found = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      found |= flat(value, f"{path}{key}.")
    else:
      found[f"{path}{key}"] = value
  return found
