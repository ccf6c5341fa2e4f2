"""What became of each field of a `config.json` that is turned into a config of ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

WIDEST = 60  # characters of a field's value that the table shows


@dataclasses.dataclass(frozen=True)
class FieldReport:
  """One field of a config.json, and its translation.

  Attributes:
    name: key of the field.
    value: its value in the file.
    text: the setting that the field became, with its value; or why it became none.
  """

  name: str
  value: Any
  text: str

  def __str__(self) -> str:
    value = repr(self.value)
    return f"{self.name} = {value if len(value) <= WIDEST else value[: WIDEST - 3] + '...'}"


@dataclasses.dataclass
class ConfigReport:
  """A `config.json` with the settings that were read from it; it accounts for each field once.

  Attributes:
    kind: kind of the file, in words for the user.
    values: the fields of the file.
    settings: settings of this program, by dotted name.
    taken: fields that became settings.
    same: fields whose value is what this program does anyway, or that do not bear on training.
    missing: fields that are not supported or not understood.
    defaults: what the file leaves out, where the default of `transformers` differs from ours.
    notes: sentences that the user should know before training.
  """

  kind: str
  values: Mapping[str, Any]
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  taken: list[FieldReport] = dataclasses.field(default_factory=list)
  same: list[FieldReport] = dataclasses.field(default_factory=list)
  missing: list[FieldReport] = dataclasses.field(default_factory=list)
  defaults: list[FieldReport] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)

  def get(self, name: str, default: Any = None) -> Any:
    """The value in the file; null counts as absent."""
    value = self.values.get(name)
    return default if value is None else value

  def integer(self, name: str, default: int) -> int:
    """The value in the file, which must be a whole number.

    Raises:
      ValueError: if it is not.
    """
    value = self.get(name, default)
    if type(value) is not int:
      raise ValueError(f"{name} is {value!r}; expected a whole number.")
    return value

  def take(self, name: str, settings: Mapping[str, Any], why: str = "") -> None:
    """Account for a field that became `settings`, or that `why` alone explains."""
    self.settings |= settings
    text = ", ".join(f"{setting} = {value!r}" for setting, value in settings.items())
    text += f"{': ' if text and why else ''}{why}"
    self.taken.append(FieldReport(name, self.values.get(name), text))

  def ignore(self, why: str, *names: str) -> None:
    """Account for those of `names` in the file that need no setting and have no entry yet."""
    new = self.values.keys() & set(names) - self._accounted()
    self.same += [FieldReport(name, self.values[name], why) for name in names if name in new]

  def lack(self, name: str, why: str) -> None:
    """Account for a field that is understood and has no counterpart here."""
    self.missing.append(FieldReport(name, self.values.get(name), why))

  def finish(self) -> "ConfigReport":
    """List every field without an entry as not understood."""
    accounted = self._accounted()
    for name, value in self.values.items():
      if name not in accounted:
        self.missing.append(FieldReport(name, value, "not understood"))
    return self

  def table(self) -> str:
    """What became of each field, in Markdown that reads as text."""
    parts = [
      ("taken", self.taken),
      ("NOT supported or not understood", self.missing),
      ("not in the file, where defaults differ: that of transformers is taken", self.defaults),
      ("nothing to take: the same here, or without effect on training", self.same),
    ]
    lines = [f"{self.kind}: {len(self.values)} fields"]
    for title, entries in parts:
      if entries:
        width = max(len(str(entry)) for entry in entries)
        lines += ["", f"{title} ({len(entries)})"]
        lines += [f"  {entry!s:<{width}}  {entry.text}" for entry in entries]
    return "\n".join([*lines, "", *self.notes])

  def _accounted(self) -> set[str]:
    return {entry.name for entry in (*self.taken, *self.same, *self.missing)}
