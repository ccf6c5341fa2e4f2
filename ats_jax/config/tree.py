"""The config that files edit: a ConfigDict that knows the kinds of its sections."""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, get_origin

from ml_collections import ConfigDict

from ats_jax.config.names import default_of, flatten, is_section, settings, unmet
from ats_jax.config.schema import Config
from ats_jax.config.schema.setting import Kinds, Table, kinds_of


class Section(ConfigDict):
  """A section of a config, or all of it.

  It differs from a ConfigDict in the sections that are of several kinds: a new name brings the
  settings of that kind and drops those of the former. Such a section may be assigned a kind's name,
  an instance of its dataclass, or a mapping.
  """

  _fields: dict[str, Any]  # of ConfigDict
  _schema: type | None  # the dataclass of its values; None: one that a file invented
  _kinds: Kinds | None  # that it is one of

  def __init__(self, initial_dictionary: Any = None, type_safe: bool = True, **options: Any):
    super(ConfigDict, self).__setattr__("_schema", None)
    super(ConfigDict, self).__setattr__("_kinds", None)
    super().__init__(initial_dictionary, type_safe, **options)

  @classmethod
  def of(cls, value: Any, kinds: Kinds | None = None, *, type_safe: bool = True) -> "Section":
    """The section of a dataclass's values; `kinds` are those that it is one of."""
    section = cls(type_safe=type_safe)
    super(ConfigDict, section).__setattr__("_schema", type(value))
    super(ConfigDict, section).__setattr__("_kinds", kinds)
    for field in dataclasses.fields(value):
      inner = getattr(value, field.name)
      if dataclasses.is_dataclass(inner):
        inner = cls.of(inner, kinds_of(field), type_safe=type_safe)
      elif isinstance(inner, Table):
        inner = Table(inner)  # a file may add to it
      section._fields[field.name] = inner
    return section

  def __setitem__(self, key: str, value: Any) -> None:
    field = self._field(key)
    if field is None:
      super().__setitem__(key, value)
    elif (kinds := kinds_of(field)) is not None and not isinstance(value, Section):
      self._fields[key] = _section_of(kinds, value, type_safe=self.is_type_safe)
    elif is_section(field.type) and not isinstance(value, Section):
      if not isinstance(value, dict):
        raise ValueError(f"config: {key} is a section, got {value!r}.")
      inner = Section.of(field.type(), type_safe=self.is_type_safe)
      inner.assign_nested(value)
      self._fields[key] = inner
    elif get_origin(field.type) is Table and isinstance(value, dict | ConfigDict):
      self._fields[key] = Table(dict(value))
    elif self._kinds is not None and key == Kinds.TAG and value != self._fields[key]:
      super().__setitem__(key, value)
      self._become(str(value))
    else:
      super().__setitem__(key, value)

  def update(self, *other: Any, **kwargs: Any) -> None:
    """Set values by section and name, those first that choose kinds."""
    for values in (*other, kwargs):
      self.assign_nested(values.to_dict() if isinstance(values, ConfigDict) else values)

  def update_from_flattened_dict(
    self, flattened_dict: Mapping[str, Any], strip_prefix: str = ""
  ) -> None:
    """Set values by dotted name, those first that choose kinds, in whatever order they come."""
    of_self = {n: v for n, v in flattened_dict.items() if n.startswith(strip_prefix)}
    self.assign({name.removeprefix(strip_prefix): value for name, value in of_self.items()})

  def assign(self, values: Mapping[str, Any]) -> None:
    """Set values by dotted name: first those that choose kinds, then the others."""
    for name, value in sorted(values.items(), key=lambda item: not self._chooses(item[0])):
      path, _, key = name.rpartition(".")
      section = self._inner(path)
      if section is not None:
        section[key] = value
      elif path in self._fields:
        raise ValueError(f"config: {name} is set, but {path} is no section.")
      else:  # as a file could; `from_config_dict` says what was meant
        self._fields[path] = ConfigDict({key: value})

  def assign_nested(self, values: Mapping[str, Any]) -> None:
    """Set values by section and name, those first that choose kinds."""
    for key, value in sorted(values.items(), key=lambda item: item[0] != Kinds.TAG):
      if isinstance(value, ConfigDict):
        value = value.to_dict()
      inner = self._fields.get(key)
      if isinstance(inner, Section) and isinstance(value, Mapping):
        inner.assign_nested(value)
      else:
        self[key] = value

  def _chooses(self, name: str) -> bool:
    """Whether a setting says of which kind a section is."""
    path, _, key = name.rpartition(".")
    section = self._inner(path)
    if section is None:
      return False
    field = section._field(key)
    return (section._kinds is not None and key == Kinds.TAG) or (
      field is not None and kinds_of(field) is not None
    )

  def _inner(self, path: str) -> "Section | None":
    """The section of a dotted name; "" is this one. None if there is no such."""
    section: Any = self
    for part in filter(None, path.split(".")):
      section = section._fields.get(part) if isinstance(section, Section) else None
    return section if isinstance(section, Section) else None

  def _field(self, key: str) -> dataclasses.Field | None:
    if self._schema is None:
      return None
    return next((f for f in dataclasses.fields(self._schema) if f.name == key), None)

  def _become(self, name: str) -> None:
    """Take the settings of another kind; what was set that only the new one has is kept."""
    kinds = self._kinds
    assert kinds is not None and self._schema is not None
    before = {f.name for f in dataclasses.fields(self._schema)}
    common = {field.name for field in dataclasses.fields(kinds.base)}
    of_new = Section.of(kinds[name](name=name), kinds, type_safe=self.is_type_safe)
    for key in before - common:
      del self._fields[key]
    for key in set(of_new.keys()) - common - self._fields.keys():
      self._fields[key] = of_new[key]
    super(ConfigDict, self).__setattr__("_schema", of_new._schema)


def base_config() -> ConfigDict:
  """Return every setting at its default.

  Assigning a wrong type raises at once; an unknown name is refused by `from_config_dict`, which
  can say what was meant.
  """
  return Section.of(Config())


def edited(values: Mapping[str, Any]) -> Section:
  """The config that files edit, with nested values in place of some defaults."""
  tree = Section.of(Config())
  tree.assign_nested(values)
  return tree


def updated(nested: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
  """A copy of a nested config with some settings, by dotted name, replaced; unchecked.

  Where one chooses another kind of a section, the settings of the former kind are dropped. Those
  that `nested` has set and that have no effect any more get their defaults.
  """
  tree = Section.of(Config(), type_safe=False)  # `from_config_dict` checks the types
  tree.assign_nested(nested)
  had_effect = _with_effect(tree)
  tree.assign(values)
  idle = had_effect.keys() - _with_effect(tree).keys() - values.keys()
  # Kinds first: with another one, its section has other settings.
  for name in sorted(idle, key=lambda name: not tree._chooses(name)):
    if name in settings(flatten(tree.to_dict())):
      tree.assign({name: default_of(name, had_effect[name])})
  return tree.to_dict()


def dropped(
  before: Mapping[str, Any], after: Mapping[str, Any], given: Container[str]
) -> list[str]:
  """The settings of a nested config that `updated` set back or took away, as name=value.

  Args:
    before: what `updated` got.
    after: what it returned.
    given: the names of the values that it set.
  """
  was, now = (flatten(edited(values).to_dict()) for values in (before, after))
  usual = {name: default_of(name, field) for name, field in settings(was).items()}
  return [
    f"{name}={value}"
    for name, value in was.items()
    if name in usual and name not in given and value != usual[name] and now.get(name) != value
    and name.removesuffix(f".{Kinds.TAG}") not in given
  ]  # fmt: skip


def _with_effect(tree: Section) -> dict[str, dataclasses.Field]:
  """The settings of a config that have an effect."""
  flat = flatten(tree.to_dict())
  fields = settings(flat)
  return {n: f for n, f in fields.items() if unmet(n, fields, flat) is None}


def _section_of(kinds: Kinds, value: Any, *, type_safe: bool) -> Section:
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return Section.of(value, kinds, type_safe=type_safe)
  values = {Kinds.TAG: value} if isinstance(value, str) else value
  if isinstance(values, ConfigDict):
    values = values.to_dict()
  if not isinstance(values, Mapping):
    raise ValueError(
      f"config: {kinds.path} is a section, got {value!r:.60}. Assign the name of a kind "
      f"({', '.join(kinds)}), a mapping or an instance of its class."
    )
  section = Section.of(kinds.default, kinds, type_safe=type_safe)
  section.assign_nested(values)
  return section
