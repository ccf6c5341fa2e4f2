"""From nested values to the frozen dataclasses of the schema, and changes to these."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from ml_collections import ConfigDict

from ats_jax.config.names import as_value, flatten, in_words, is_section, to_dict
from ats_jax.config.schema import Config
from ats_jax.config.schema.setting import Kinds, Table, kinds_of
from ats_jax.config.tree import updated
from ats_jax.config.validate import validate
from ats_jax.extensions import are_loaded


def from_config_dict(config: ConfigDict | Mapping[str, Any]) -> Config:
  """Turn a ConfigDict (or plain nested mapping) into a validated `Config`.

  Raises:
    ValueError: for an unknown key (with the nearest known one), a wrong type, or a broken rule.
  """
  return validate(unchecked(config.to_dict() if isinstance(config, ConfigDict) else config))


def unchecked(values: Mapping[str, Any]) -> Config:
  """A `Config` of nested values, of which only names and types are checked.

  Raises:
    ValueError: for an unknown key (with the nearest known one), or a wrong type.
  """
  entries = extensions_of(values) if isinstance(values, Mapping) else ()
  return _build(Config, values, "", extensible=not are_loaded(entries))


def extensions_of(values: Mapping[str, Any]) -> tuple[str, ...]:
  """The setting `extensions` of nested values, which says what else they may hold.

  Raises:
    ValueError: if it is not of its type.
  """
  (field,) = (f for f in dataclasses.fields(Config) if f.name == "extensions")
  return _typed(values.get(field.name, field.default), field.type, field.name)


def _build(cls: type, values: Any, path: str, *, extensible: bool) -> Any:
  if not isinstance(values, Mapping):
    raise ValueError(f"config: {path[:-1] or 'it'} is a section, got {values!r}.")
  fields = {f.name: f for f in dataclasses.fields(cls)}
  for key in values:
    if key not in fields:
      near = difflib.get_close_matches(key, fields, n=1)
      hint = f" Did you mean {path}{near[0]}?" if near else f" Known: {', '.join(sorted(fields))}."
      raise ValueError(f"config: unknown key {path}{key}.{hint}")
  kwargs = {}
  for key, value in values.items():
    field, kind = fields[key], fields[key].type
    if (kinds := kinds_of(field)) is not None:
      kwargs[key] = _build_kind(kinds, value, f"{path}{key}", extensible=extensible)
    elif is_section(kind):
      kwargs[key] = _build(kind, value, f"{path}{key}.", extensible=extensible)
    else:
      kinds = field.metadata["elements"]
      kwargs[key] = _typed(value, kind, path + key, kinds, extensible=extensible)
  return cls(**kwargs)


def _build_kind(kinds: Kinds, value: Any, path: str, *, extensible: bool) -> Any:
  """A section of one of several kinds: of a mapping, or of the name of a kind alone.

  A kind that nobody knows may be of an extension that is not loaded; then what all kinds have is
  taken.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = to_dict(value)
  values = {Kinds.TAG: value} if isinstance(value, str) else value
  if not isinstance(values, Mapping):
    raise ValueError(f"config: {path} is a section, got {values!r}.")
  name = values.get(Kinds.TAG, kinds.default_name)
  cls = kinds[name] if isinstance(name, str) else kinds.base
  if isinstance(name, str) and name not in kinds:
    if not extensible:
      raise ValueError(kinds.unknown(name))
    common = {f.name for f in dataclasses.fields(cls)}
    values = {key: value for key, value in values.items() if key in common}
  if name in kinds:
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values.keys() - known:
      if others := kinds.with_field(key):
        raise ValueError(
          f"config: {path}.{key} is a setting of {path}.{Kinds.TAG}={' and '.join(others)}, and "
          f"{path}.{Kinds.TAG} is {name}. Choose that, or leave {path}.{key} out."
        )
  return _build(cls, {Kinds.TAG: name, **values}, f"{path}.", extensible=extensible)


def _typed(
  value: Any, kind: Any, name: str, kinds: Kinds | None = None, *, extensible: bool = False
) -> Any:
  """A value of a type, whose elements may be dataclasses, one of `kinds` each."""
  if kinds is not None and is_section(kind):
    return _build_kind(kinds, value, name, extensible=extensible)
  if is_section(kind):
    values = to_dict(value) if isinstance(value, kind) else value
    return _build(kind, values, f"{name}.", extensible=extensible)
  origin, inner = get_origin(kind), get_args(kind)
  if origin is tuple:
    if not isinstance(value, list | tuple):
      raise ValueError(f"config: {name} must be a list of {in_words(inner[0])}, got {value!r}.")
    typed = functools.partial(_typed, kind=inner[0], kinds=kinds, extensible=extensible)
    return tuple(typed(one, name=f"{name}[{i}]") for i, one in enumerate(value))
  if origin is Table:
    if not isinstance(value, Mapping):
      raise ValueError(
        f"config: {name} must be a table of names and {in_words(inner[0])}s, got {value!r}."
      )
    typed = functools.partial(_typed, kind=inner[0], kinds=kinds, extensible=extensible)
    return Table({key: typed(one, name=f"{name}[{key!r}]") for key, one in value.items()})
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
    raise ValueError(f"config: {name} must be {in_words(kind)}, got {value!r}.")
  return value


def with_settings(cfg: Config, values: Mapping[str, Any]) -> Config:
  """`cfg` with some settings, by dotted name, changed; valid.

  Raises:
    ValueError: as `from_config_dict`.
  """
  return from_config_dict(updated(to_dict(cfg), values))


CHANGES = "settings"  # where a checkpoint keeps what `with_changes` takes


def with_changes(cfg: Config, changes: Mapping[str, Sequence[Any]]) -> Config:
  """`cfg` with the changes of an orchestrator: {name: (old value, new value)}.

  Where `cfg` no longer has the old value, the user has set another one since, which stays.
  """
  flat = flatten(cfg)
  ours = {n: now for n, (was, now) in changes.items() if flat.get(n) == as_value(was)}
  return with_settings(cfg, ours)


def count_epochs(
  cfg: Config, num_epochs: float, num_rows: int, done: tuple[int, int] = (0, 0)
) -> Config:
  """`cfg` with the `num_steps` of so many epochs, `num_rows` training rows each.

  `done` are the steps that were made, and the rows that they read: the others are of this `cfg`.

  Raises:
    ValueError: as `from_config_dict`, for rules that join `num_steps` with others.
  """
  steps, rows = done
  left = (num_epochs * num_rows - rows) / cfg.data.batch_size
  num_steps = max(1, steps + math.ceil(round(left, 6)))
  given: dict[str, Any] = {"num_steps": num_steps, "num_epochs": 0.0, "length": "given"}
  if cfg.length == "phases":  # then the last one has no end of its own
    *before, last = cfg.data.phases
    endless = dataclasses.replace(last, steps=0, tokens=0, epochs=0.0)
    given["data.phases"] = (*before, endless)
  with_settings(cfg, given)
  return dataclasses.replace(cfg, num_steps=num_steps)


def resolve(cfg: Config, tokenizer_size: int) -> Config:
  """Replace the zeros that stand for "derive it" by the derived values.

  `precision.compute_dtype=auto` becomes bfloat16: who knows the device asks for its format before
  (`ops.requirements.with_compute_dtype`).

  Raises:
    ValueError: if the vocabulary is smaller than the tokenizer's.
  """
  m = cfg.model
  vocab_size = m.vocab_size or -(-tokenizer_size // 128) * 128
  if vocab_size < tokenizer_size:
    raise ValueError(
      f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer_size} tokens. "
      f"Use at least {tokenizer_size}, or 0 to take it from the tokenizer."
    )
  head_dim = m.head_width
  model = dataclasses.replace(
    m,
    vocab_size=vocab_size,
    head_dim=head_dim,
    v_head_dim=(m.v_head_dim or head_dim) if m.kv_latent_dim else m.v_head_dim,
    d_ff=m.d_ff or -(-8 * m.d_model // (3 * 256)) * 256,
  )
  moe, mod = cfg.moe, cfg.mod
  if moe.num_experts:
    moe = dataclasses.replace(moe, d_ff=moe.d_ff or model.d_ff)
  if mod.routing != "none":
    mod = dataclasses.replace(mod, end_layer=mod.end_layer or m.num_layers)
  precision = cfg.precision
  if precision.compute_dtype == "auto":
    precision = dataclasses.replace(precision, compute_dtype="bfloat16")
  return dataclasses.replace(cfg, model=model, moe=moe, mod=mod, precision=precision)
