"""The `config.json` of a Hugging Face model as a config of ours, for a run from scratch.

The shape is read by the tables of `bridge.family` that an import of weights uses; what a run needs
besides is added here. Nothing in the file is executed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ats_jax.bridge.config_report import ConfigReport, FieldReport
from ats_jax.bridge.families import CONFIGS
from ats_jax.bridge.family import (
  WRITTEN,
  FieldRow,
  contradiction,
  read_row,
  without_unused_experts,
)
from ats_jax.config.build import with_settings
from ats_jax.config.names import all_settings, default_of
from ats_jax.config.schema import Config
from ats_jax.store import paths

LONGEST_ROW = 4096  # what data.seq_len is set to where a model has more positions


def read(file: str) -> ConfigReport:
  """Read a config.json into settings, which are then known to be valid.

  A tokenizer.json in the same folder is taken.

  Raises:
    ValueError: for a file that is not the config.json of a model known here, a field that is
      missing or wrong, or settings that this program refuses.
  """
  path = Path(file)
  try:
    report = _read_model(_parse(path), path)
    with_settings(Config(), report.settings)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
  return report


def _parse(path: Path) -> Mapping[str, Any]:
  expected = "Expected the config.json of a Hugging Face model."
  try:
    values = paths.parse_json(path.read_text(encoding="utf-8"))
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"cannot be read as text: {error}") from error
  except ValueError as error:
    raise ValueError(f"is not JSON ({error}). {expected}") from error
  if not isinstance(values, dict):
    raise ValueError(f"is JSON, but not an object of names and values. {expected}")
  if not {"model_type", "architectures"} & values.keys():
    names = ", ".join(list(values)[:8])
    raise ValueError(f"has no model_type (it has {names}). {expected}")
  return values


def _read_model(values: Mapping[str, Any], path: Path) -> ConfigReport:
  kind = values.get("model_type")
  if not isinstance(kind, str) or kind not in CONFIGS:
    raise ValueError(
      f"model_type={kind!r} is not a model that can be read. Known: {', '.join(CONFIGS)}."
    )
  report = ConfigReport(f"Hugging Face model, {kind}", values)
  implied: dict[str, Any] = {}
  for row in (*CONFIGS[kind].fields, *CONFIGS[kind].training):
    implied |= _take(report, row)
  report.settings = without_unused_experts(report.settings)
  if "moe.num_experts" in report.settings:
    _say_what_balances(report)
  report.take("model_type", implied, "a decoder with RMSNorm, RoPE and a gated MLP")
  if lack := contradiction(report.settings):
    report.lack("model_type", lack)
  _run(report, path)
  passed_over = {*CONFIGS[kind].passed_over(values), *WRITTEN}
  report.ignore("nothing for training", *sorted(passed_over))
  return report.finish()


def _take(report: ConfigReport, row: FieldRow) -> Mapping[str, Any]:
  """Account for the fields of a row; returns the settings that no field stands for."""
  theirs = report.values
  present = [key for key in row.keys if theirs.get(key) is not None]
  ours, refused = _read_row(row, theirs, present)
  report.settings |= ours
  for key, why in refused.items():
    report.lack(key, why)
  if not row.keys:
    return ours
  taken = [key for key in row.keys if key in theirs and key not in refused]
  taken.sort(key=lambda key: theirs[key] is None)
  if not ours:
    report.ignore("no setting is needed for it", *taken)
  elif taken:
    report.take(taken[0], ours)
    for key in taken[1:]:
      report.take(key, {}, f"with {taken[0]}")
  elif not refused:
    usual = {name: default_of(name, all_settings()[name][0].field) for name in ours}
    report.defaults += [
      FieldReport(row.keys[0], None, f"{name} = {value!r} (ours: {usual[name]!r})")
      for name, value in ours.items()
      if value != usual[name]
    ]
  return {}


def _read_row(
  row: FieldRow, theirs: Mapping[str, Any], present: Sequence[str]
) -> tuple[Mapping[str, Any], dict[str, str]]:
  """The settings of a row, and why it refuses fields, which are then left out.

  Raises:
    ValueError: if the row cannot be read without them.
  """
  try:
    return read_row(row, theirs), {}
  except ValueError as error:
    for gone in (*((key,) for key in present), tuple(present)):
      # A refused block may still hold what the row also reads outside a block, as `rope_theta`.
      blocks = [theirs[key] for key in gone if isinstance(theirs[key], Mapping)]
      left = {k: v for block in blocks for k, v in block.items() if k in row.keys}
      left |= {k: v for k, v in theirs.items() if k not in gone}
      try:
        return read_row(row, left), dict.fromkeys(gone, str(error))
      except ValueError:
        continue
    raise


def _say_what_balances(report: ConfigReport) -> None:
  values = {
    name: known[0].field.default for name, known in all_settings().items()
  } | report.settings
  names = ("moe.bias_update", "moe.aux_loss", "moe.z_loss")
  report.notes.append(
    f"What balances experts: {', '.join(f'{name}={values[name]}' for name in names)}."
  )


def _run(report: ConfigReport, path: Path) -> None:
  """What a run needs besides the shape."""
  rows = {"data.seq_len": min(report.integer("max_position_embeddings", LONGEST_ROW), LONGEST_ROW)}
  if report.get("max_position_embeddings") is not None:
    report.take("max_position_embeddings", rows)
  report.settings |= rows
  for name in ("torch_dtype", "dtype"):
    value = report.get(name)
    if value in ("bfloat16", "float32"):
      report.take(name, {"precision.compute_dtype": value}, "weights are trained in float32")
    elif value:
      report.lack(name, "matmuls are in bfloat16 or float32; bfloat16 is used")
  tokenizer = path.resolve().parent / "tokenizer.json"
  if tokenizer.is_file():
    report.settings["data.tokenizer"] = str(tokenizer)
    report.notes.append(f"The tokenizer is that of the same folder: {tokenizer}.")
  else:
    report.settings["data.bpe_vocab_size"] = max(300, report.integer("vocab_size", 0))
    report.notes.append(
      "There is no tokenizer.json in the same folder: a BPE is trained on your text. "
      "--config.data.tokenizer=FILE names the model's own."
    )


def config_file_text(report: ConfigReport, file: str, target: str) -> str:
  """The text of a config file of ours, with the settings of a report.

  `file` is the config.json as the user named it, `target` where the text will be written.
  """
  plain = lambda text: _printable(text).replace("\\", "/").replace('"""', "'''")
  head = [
    f'"""From {plain(file)} ({report.kind}).',
    "",
    f"Command: python -m ats_jax train --config={plain(target)} --workdir=runs/imported \\\\",
    "  --config.data.paths=TEXT",
  ]
  if report.missing:
    head += ["", "Not supported, or not understood:"]
    head += [f"  {plain(str(entry))}: {plain(entry.text)}" for entry in report.missing]
  body = ["from ats_jax.config import base_config", "", "", "def get_config():"]
  body.append("  config = base_config()")
  body += [
    f"  config.{setting} = {_typed(setting, report.settings[setting])!r}"
    for setting in all_settings()
    if setting in report.settings
  ]
  return "\n".join([*head, '"""', "", *body, "  return config", ""])


def _printable(text: str) -> str:
  return "".join(c if c.isprintable() else " " for c in text)


def _typed(setting: str, value: Any) -> Any:
  """Makes a whole number a float where the setting is one."""
  return float(value) if all_settings()[setting][0].field.type is float else value
