"""ConfigDicts and the frozen dataclasses of the schema; `--explain`; comparing two configs."""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ats_jax.config.schema import Config
from ats_jax.config.validate import format_bound, validate


def to_dict(cfg: Any) -> dict[str, Any]:
  """Return a (nested) config dataclass as a plain nested dict."""
  return dataclasses.asdict(cfg)


def base_config() -> ConfigDict:
  """Return every setting at its default.

  Assigning a wrong type raises at once; an unknown name is refused by `from_config_dict`, which
  can say what was meant.
  """
  return ConfigDict(to_dict(Config()))


def from_config_dict(config: ConfigDict | Mapping[str, Any]) -> Config:
  """Turn a ConfigDict (or plain nested mapping) into a validated `Config`.

  Raises:
    ValueError: for an unknown key (with the nearest known one), a wrong type, or a broken rule.
  """
  values = config.to_dict() if isinstance(config, ConfigDict) else config
  return validate(_build(Config, values, path=""))


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
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
    kind = fields[key].type
    assert isinstance(kind, type)
    if dataclasses.is_dataclass(kind):
      kwargs[key] = _build(kind, value, f"{path}{key}.")
    else:
      kwargs[key] = _typed(value, kind, path + key)
  return cls(**kwargs)


def _typed(value: Any, kind: type, name: str) -> Any:
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
    raise ValueError(f"config: {name} must be {kind.__name__}, got {value!r}.")
  return value


def flatten(cfg: Config | Mapping[str, Any]) -> dict[str, Any]:
  """Return `{"model.num_layers": 4, ...}` of a config, or of what a config.json holds."""
  flat = {}
  for key, value in (to_dict(cfg) if isinstance(cfg, Config) else cfg).items():
    if isinstance(value, dict):
      flat.update({f"{key}.{k}": v for k, v in value.items()})
    else:
      flat[key] = value
  return flat


def settings() -> dict[str, dataclasses.Field]:
  """Return every public setting's dataclass field by dotted name."""
  found = {}
  for field in dataclasses.fields(Config):
    if dataclasses.is_dataclass(field.type):
      found.update({f"{field.name}.{f.name}": f for f in dataclasses.fields(field.type)})
    else:
      found[field.name] = field
  return found


def explain(name: str) -> str:
  """Describe a setting (`model.num_layers`), or every setting of a section (`model`).

  Raises:
    ValueError: if there is no such setting.
  """
  known = settings()
  names = [name] if name in known else [k for k in known if k.startswith(name + ".")]
  if not names:
    last = name.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, known, n=1)
    sections = sorted({k.partition(".")[0] for k in known if "." in k})
    hint = f"Did you mean {near[0]}?" if near else f"The sections are {', '.join(sections)}."
    raise ValueError(f"--explain: no setting {name!r}. {hint}")
  return "\n".join(_describe(n, known[n]) for n in names)


def _describe(name: str, field: dataclasses.Field) -> str:
  kind, meta, parts = field.type, field.metadata, [f"default {field.default!r}"]
  assert isinstance(kind, type)
  if meta["unit"]:
    parts.append(f"unit: {meta['unit']}")
  if meta["choices"]:
    parts.append("one of " + ", ".join(meta["choices"]))
  elif meta["low"] is not None or meta["high"] is not None:
    low = "-inf" if meta["low"] is None else format_bound(meta["low"])
    high = "inf" if meta["high"] is None else format_bound(meta["high"])
    parts.append(f"range [{low}, {high}]")
  may = "may change on resume" if meta["resume"] == "free" else "fixed for a workdir"
  return f"{name} ({kind.__name__}): {meta['doc']}\n    {'; '.join(parts)}; {may}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
  """Compare two flat configs: `{name: (old, new, may_change)}` for each setting that differs.

  A setting that one side lacks (written by another version) counts as its default.
  """
  changed = {}
  for name, field in settings().items():
    was, now = old.get(name, field.default), new.get(name, field.default)
    if was != now:
      changed[name] = (was, now, field.metadata["resume"] == "free")
  return changed


def updated(nested: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
  """A copy of a nested config with some settings, by dotted name, replaced; unchecked."""
  changed = {k: dict(v) if isinstance(v, Mapping) else v for k, v in nested.items()}
  for name, value in values.items():
    section, _, key = name.rpartition(".")
    (changed.setdefault(section, {}) if section else changed)[key] = value
  return changed


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
  return with_settings(cfg, {n: now for n, (was, now) in changes.items() if flat[n] == was})


def count_epochs(cfg: Config, num_epochs: float, num_rows: int) -> Config:
  """`cfg` with the `num_steps` of so many epochs, `num_rows` training rows each.

  Raises:
    ValueError: as `from_config_dict`, for rules that join `num_steps` with others.
  """
  num_steps = max(1, math.ceil(round(num_epochs * num_rows / cfg.data.batch_size, 6)))
  validate(dataclasses.replace(cfg, num_steps=num_steps, num_epochs=0.0, length="given"))
  return dataclasses.replace(cfg, num_steps=num_steps)


def resolve(cfg: Config, tokenizer_size: int) -> Config:
  """Replace the zeros that stand for "derive it" by the derived values.

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
  head_dim = m.head_dim or m.d_model // m.num_heads
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
  return dataclasses.replace(cfg, model=model, moe=moe, mod=mod)
