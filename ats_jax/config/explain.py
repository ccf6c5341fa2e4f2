"""What `--explain` says of settings."""

import dataclasses
import difflib
from typing import Any, get_args, get_origin

from ats_jax.config.names import Known, all_settings, conditions, default_of
from ats_jax.config.schema.setting import Table
from ats_jax.config.validate import format_bound


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
  return "\n".join(describe(n, one) for n in names for one in known[n])


def describe(name: str, known: Known) -> str:
  """Two lines on a setting: its meaning, and its default, range and place."""
  field, meta = known.field, known.field.metadata
  parts = [f"default {default_of(name, field)!r}"]
  if meta["unit"]:
    parts.append(f"unit: {meta['unit']}")
  if meta["choices"]:
    parts.append("one of " + ", ".join(meta["choices"]))
  elif meta["low"] is not None or meta["high"] is not None:
    low = "-inf" if meta["low"] is None else format_bound(meta["low"])
    high = "inf" if meta["high"] is None else format_bound(meta["high"])
    parts.append(f"range [{low}, {high}]")
  if known.kinds:
    assert known.section is not None
    parts.append(f"of {known.section.path}={' and '.join(known.kinds)}")
  if needs := [one.words for one in conditions(name, field) if one.setting != name]:
    parts.append(f"needs {' and '.join(needs)}")
  may = "may change on resume" if meta["resume"] == "free" else "fixed for a workdir"
  return f"{name} ({type_in_words(field)}): {meta['doc']}\n    {'; '.join(parts)}; {may}"


def type_in_words(field: dataclasses.Field) -> str:
  """The type of a setting: "int", "list of str", "table of float"."""
  kind: Any = field.type
  if get_origin(kind) is tuple:
    return f"list of {get_args(kind)[0].__name__}"
  if get_origin(kind) is Table:
    return f"table of {get_args(kind)[0].__name__}"
  return kind.__name__
