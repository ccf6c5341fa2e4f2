"""Settings by dotted name: which there are, what a config says of them, how two configs differ."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, get_args, get_origin

from ats_jax.config.schema import Config
from ats_jax.config.schema.setting import Condition, Kinds, Table, kinds_of


class Known(NamedTuple):
  """A setting that some config can have.

  Attributes:
    field: its declaration.
    kinds: those of its section that have it; empty = its section is always the same, or all have.
    section: the kinds that its section can be of, if it is of several.
  """

  field: dataclasses.Field
  kinds: tuple[str, ...] = ()
  section: Kinds | None = None


def to_dict(cfg: Any) -> dict[str, Any]:
  """Return a (nested) config dataclass as a plain nested dict."""
  return dataclasses.asdict(cfg)


def settings(values: Config | Mapping[str, Any] | None = None) -> dict[str, dataclasses.Field]:
  """The field of each setting, by dotted name.

  Args:
    values: a config, or the flat values of one, whose kinds of sections are looked at; None = the
      default kinds.
  """
  if values is None:
    values = Config()
  flat = flatten(values) if isinstance(values, Config) else values
  return dict(_walk(Config, "", flat))


def _walk(cls: type, path: str, flat: Mapping[str, Any]) -> Iterator[tuple[str, dataclasses.Field]]:
  for field in dataclasses.fields(cls):
    name, kinds = path + field.name, kinds_of(field)
    if kinds is not None:
      kind = flat.get(f"{name}.{Kinds.TAG}", kinds.default.name)
      yield from _walk(kinds[kind], f"{name}.", flat)
    elif is_section(field.type):
      yield from _walk(field.type, f"{name}.", flat)
    else:
      yield name, field


def all_settings() -> dict[str, list[Known]]:
  """Every setting of every kind, by dotted name; several where kinds declare it in several ways."""
  known: dict[str, list[Known]] = {}
  _collect(dataclasses.fields(Config), "", Known, known)
  return known


def _collect(
  fields: Iterable[dataclasses.Field],
  path: str,
  make: Callable[[dataclasses.Field], Known],
  known: dict[str, list[Known]],
) -> None:
  for field in fields:
    name, kinds = path + field.name, kinds_of(field)
    if kinds is not None:
      _collect_kinds(kinds, f"{name}.", known)
    elif is_section(field.type):
      _collect(dataclasses.fields(field.type), f"{name}.", make, known)
    else:
      known.setdefault(name, []).append(make(field))


def _collect_kinds(kinds: Kinds, path: str, known: dict[str, list[Known]]) -> None:
  _collect(dataclasses.fields(kinds.base), path, lambda field: Known(field, (), kinds), known)
  having: dict[dataclasses.Field, list[str]] = {}  # kinds may share the declaration of a field
  for kind in kinds:
    for field in dataclasses.fields(kinds[kind]):
      if field.name in kinds.own(kind):
        having.setdefault(field, []).append(kind)
  for field, of in having.items():
    make = lambda field, of=tuple(of): Known(field, of, kinds)
    _collect([field], path, make, known)


def default_of(name: str, field: dataclasses.Field) -> Any:
  """The value of a setting when nothing is said; of one that chooses a kind, the default kind."""
  section, _, key = name.rpartition(".")
  return KINDS[section].default_name if section in KINDS and key == Kinds.TAG else field.default


def conditions(name: str, field: dataclasses.Field) -> tuple[Condition, ...]:
  """What a setting needs to have an effect: its own condition, and those of its sections."""
  needs = [*field.metadata["needs"]]
  while "." in name:
    name = name.rpartition(".")[0]
    needs.append(NEEDS.get(name))
  return tuple(one for one in needs if one is not None)


def unmet(
  name: str,
  fields: Mapping[str, dataclasses.Field],
  flat: Mapping[str, Any],
  *,
  by_flag: bool = False,
) -> Condition | None:
  """What keeps a setting from having an effect; None = it has one.

  A setting needs its conditions, and whatever the settings need that those are about.

  Args:
    name: of the setting.
    fields: those of the config.
    flat: its values.
    by_flag: whether a flag sets it, which more conditions are about.
  """
  for needs in conditions(name, fields[name]):
    if needs.setting == name or (needs.of_flags and not by_flag):
      continue
    if not needs.is_met_by(flat):
      return needs
    if not needs.of_flags and (deeper := unmet(needs.setting, fields, flat)) is not None:
      return deeper
  return None


def flatten(cfg: Config | Mapping[str, Any]) -> dict[str, Any]:
  """Return `{"model.num_layers": 4, ...}` of a config, or of what a config.json holds."""
  flat: dict[str, Any] = {}
  _flatten(to_dict(cfg) if isinstance(cfg, Config) else cfg, "", flat)
  return flat


def _flatten(values: Mapping[str, Any], path: str, flat: dict[str, Any]) -> None:
  for key, value in values.items():
    name = path + key
    if isinstance(value, Mapping) and name in _SECTIONS:
      _flatten(value, f"{name}.", flat)
    elif isinstance(value, str) and name in KINDS:
      flat[f"{name}.{Kinds.TAG}"] = value
    else:
      flat[name] = as_value(value)


def as_value(value: Any) -> Any:
  """A value as a config holds it: lists of a JSON file are tuples, objects are tables."""
  if isinstance(value, list | tuple):
    return tuple(map(as_value, value))
  if isinstance(value, Mapping):
    return Table({key: as_value(inner) for key, inner in value.items()})
  return value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
  """Compare two flat configs: `{name: (old, new, may_change)}` for each setting that differs.

  A setting that one side lacks (written by another version) counts as its default. One that its
  kind of section does not have is None, and left out if the other kind has it at its default.
  """
  fields = [settings(old), settings(new)]
  changed = {}
  for name in {**fields[0], **fields[1]}:
    was, now = (
      flat.get(name, default_of(name, of[name])) if name in of else None
      for flat, of in zip((old, new), fields, strict=True)
    )
    field = fields[1].get(name) or fields[0][name]
    is_of_one_kind = any(name not in of for of in fields)
    if was != now and not (is_of_one_kind and default_of(name, field) in (was, now)):
      changed[name] = (was, now, field.metadata["resume"] == "free")
  return changed


def in_words(kind: Any) -> str:
  """The type of a setting: "int", "list of str", "table of float"."""
  origin, inner = get_origin(kind), get_args(kind)
  if origin is None:
    return kind.__name__
  return f"{'list' if origin is tuple else 'table'} of {in_words(inner[0])}"


def is_section(kind: Any) -> TypeGuard[type]:
  """Whether the type of a field is a section, which is always the same."""
  return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _sections(cls: type, path: str) -> Iterator[tuple[str, type, Kinds | None]]:
  for field in dataclasses.fields(cls):
    kinds = kinds_of(field)
    inner = field.type if kinds is None else kinds.base
    if is_section(inner):
      yield path + field.name, inner, kinds
      yield from _sections(inner, f"{path}{field.name}.")


_ALL = tuple(_sections(Config, ""))
_SECTIONS = frozenset(name for name, *_ in _ALL)
# The sections that are of several kinds.
KINDS: Mapping[str, Kinds] = {name: kinds for name, _, kinds in _ALL if kinds is not None}
# What a whole section needs to have an effect.
NEEDS: Mapping[str, Condition] = {n: cls.NEEDS for n, cls, _ in _ALL if hasattr(cls, "NEEDS")}
