"""What `--explain` says of settings."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterator
from typing import get_args

from ats_jax.config.names import Known, all_settings, conditions, default_of, in_words, is_section
from ats_jax.config.schema.rules import format_bound
from ats_jax.config.schema.setting import Kinds


def explain(name: str) -> str:
  """Describe a setting (`model.num_layers`), or every setting of a section (`model`).

  Of a section of several kinds all are described, each with the kinds that it belongs to.

  Raises:
    ValueError: if there is no such setting.
  """
  known = all_settings()
  names = [name] if name in known else [k for k in known if k.startswith(name + ".")]
  if not names:
    last = name.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, known, n=1)
    sections = sorted({k.partition(".")[0] for k in known if "." in k})
    hint = f"Did you mean {near[0]}?" if near else f"The sections are {', '.join(sections)}."
    raise ValueError(f"--explain: no setting {name!r}. {hint}")
  return "\n".join(line for n in names for one in known[n] for line in _lines(n, one))


def _lines(name: str, known: Known) -> Iterator[str]:
  yield describe(name, known)
  yield from options(known)


def options(known: Known) -> Iterator[str]:
  """A line on each kind that the elements of a setting can be of, and each of their options."""
  kind = next(iter(get_args(known.field.type)), None)
  kinds = known.field.metadata["elements"]
  for name, cls in ((name, kinds[name]) for name in kinds or ()):
    yield f"  {name}: {inspect.getdoc(cls)}"
    yield from _options(cls)
  if not kinds and is_section(kind):
    yield from _options(kind)


def _options(cls: type) -> Iterator[str]:
  for field in dataclasses.fields(cls):
    if field.name != Kinds.TAG:
      facts = f"default {field.default!r}{_range(field)}"
      yield f"    {field.name} ({in_words(field.type)}): {field.metadata['doc']}; {facts}"


def describe(name: str, known: Known) -> str:
  """Two lines on a setting: its meaning, and its default, range and place."""
  field, meta = known.field, known.field.metadata
  parts = [f"default {default_of(name, field)!r}"]
  if meta["unit"]:
    parts.append(f"unit: {meta['unit']}")
  if meta["choices"]:
    parts.append("one of " + ", ".join(meta["choices"]))
  elif within := _range(field):
    parts.append(within.removeprefix("; "))
  if known.kinds:
    assert known.section is not None
    parts.append(f"of {known.section.path}={' and '.join(known.kinds)}")
  if needs := [one.words for one in conditions(name, field) if one.setting != name]:
    parts.append(f"needs {' and '.join(needs)}")
  may = "may change on resume" if meta["resume"] == "free" else "fixed for a workdir"
  return f"{name} ({in_words(field.type)}): {meta['doc']}\n    {'; '.join(parts)}; {may}"


def _range(field: dataclasses.Field) -> str:
  low, high = field.metadata["low"], field.metadata["high"]
  if low is None and high is None:
    return ""
  least = "-inf" if low is None else format_bound(low)
  return f"; range [{least}, {'inf' if high is None else format_bound(high)}]"
