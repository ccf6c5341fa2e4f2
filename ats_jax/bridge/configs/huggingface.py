"""A `config.json` of a Hugging Face model: by the tables of `bridge`, with what a run needs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ats_jax.bridge.configs.families import FIELDS
from ats_jax.bridge.configs.foreign import Found, Line
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.family import CARRIED, WRITTEN, Field, FieldRow, Only, contradiction, read_row
from ats_jax.config.build import settings as known_settings

TABLES = {**{kind: family.fields for kind, family in FAMILIES.items()}, **FIELDS}
LONGEST_ROW = 4096  # what data.seq_len is set to where a model has more positions
# Fields that change training alone, which an import of weights carries along unread.
_OF_TRAINING = (
  Field("initializer_range", "model.init_std", 0.02, null=0.02),
  Only("attention_dropout", 0.0),
)


def is_model(values: Mapping[str, Any]) -> bool:
  """Whether a JSON object is a model's config.json."""
  return "model_type" in values or "architectures" in values


def read(values: Mapping[str, Any], path: Path) -> Found:
  """Read a config.json.

  Args:
    values: the file.
    path: where it is; a tokenizer.json beside it is taken.

  Raises:
    ValueError: for a kind of model that is not known here, or a name that is missing or wrong.
  """
  kind = values.get("model_type")
  if not isinstance(kind, str) or kind not in TABLES:
    raise ValueError(
      f"model_type={kind!r} is no model that can be read. Known: {', '.join(TABLES)}."
    )
  found = Found(f"Hugging Face model, {kind}", dict(values))
  if found.get("num_nextn_predict_layers"):
    found.lack("num_nextn_predict_layers", "no layers here predict further tokens")
  if kind.startswith("deepseek"):
    found.ignore("it says nothing of the shape", "quantization_config", "auto_map")
  implied: dict[str, Any] = {}
  for row in (*TABLES[kind], *_OF_TRAINING):
    implied |= _take(found, row)
  if "moe.num_experts" in found.settings:
    _balance(found, kind)
  found.give("model_type", implied, "a decoder with RMSNorm, RoPE and a gated MLP")
  if lack := contradiction(found.settings):
    found.lack("model_type", lack)
  _run(found, path)
  found.ignore("nothing for training", *sorted(CARRIED | WRITTEN))
  return found.finish()


def _take(found: Found, row: FieldRow) -> Mapping[str, Any]:
  """Speak of the fields of a row; returns the settings that no field stands for."""
  theirs = found.values
  said = [key for key in row.keys if theirs.get(key) is not None]
  ours, refused = _read(row, theirs, said)
  found.settings |= ours
  for key, why in refused.items():
    found.lack(key, why)
  if not row.keys:
    return ours
  taken = [key for key in row.keys if key in theirs and key not in refused]
  taken.sort(key=lambda key: theirs[key] is None)
  if not ours:
    found.ignore("so it is here", *taken)
  elif taken:
    found.give(taken[0], ours)
    for key in taken[1:]:
      found.give(key, {}, f"with {taken[0]}")
  elif not refused:
    usual = {name: known_settings()[name].default for name in ours}
    found.defaults += [
      Line(row.keys[0], None, f"{name} = {value!r} (ours: {usual[name]!r})")
      for name, value in ours.items()
      if value != usual[name]
    ]
  return {}


def _read(
  row: FieldRow, theirs: Mapping[str, Any], said: Sequence[str]
) -> tuple[Mapping[str, Any], dict[str, str]]:
  """The settings of a row, and why it refuses fields, which are then left out.

  Raises:
    ValueError: if the row cannot be read without them.
  """
  try:
    return read_row(row, theirs), {}
  except ValueError as error:
    for gone in (*((key,) for key in said), tuple(said)):
      # A block that is refused still says what the row also knows by itself, as `rope_theta`.
      blocks = [theirs[key] for key in gone if isinstance(theirs[key], Mapping)]
      left = {k: v for block in blocks for k, v in block.items() if k in row.keys}
      left |= {k: v for k, v in theirs.items() if k not in gone}
      try:
        return read_row(row, left), dict.fromkeys(gone, str(error))
      except ValueError:
        continue
    raise


def _balance(found: Found, kind: str) -> None:
  usual = {"olmoe": 0.01}.get(kind, 0.001)
  if kind.startswith("deepseek"):
    by_row = found.get("seq_aux", True)
    loss = "moe.sequence_aux_loss" if by_row else "moe.aux_loss"
    _take(found, Field("aux_loss_alpha", loss, usual, null=usual))
    found.settings |= {"moe.aux_loss": 0.0} if by_row else {}
    found.ignore("with aux_loss_alpha", "seq_aux")
  else:
    _take(found, Field("router_aux_loss_coef", "moe.aux_loss", usual, null=usual))
  values = {name: setting.default for name, setting in known_settings().items()} | found.settings
  names = ("moe.bias_update", "moe.aux_loss", "moe.z_loss")
  found.notes.append(
    f"What balances experts: {', '.join(f'{name}={values[name]}' for name in names)}."
  )


def _run(found: Found, path: Path) -> None:
  """What a run needs beside the shape."""
  found.settings["data.seq_len"] = LONGEST_ROW
  if found.get("max_position_embeddings"):
    found.take(
      "max_position_embeddings", "data.seq_len", LONGEST_ROW, lambda n: min(n, LONGEST_ROW)
    )
  for name in ("torch_dtype", "dtype"):
    value = found.get(name)
    if value in ("bfloat16", "float32"):
      found.give(name, {"precision.compute_dtype": value}, "weights are trained in float32")
    elif value:
      found.lack(name, "matmuls are in bfloat16 or float32; bfloat16 is used")
  tokenizer = path.resolve().parent / "tokenizer.json"
  if tokenizer.is_file():
    found.settings["data.tokenizer"] = str(tokenizer)
    found.notes.append(f"The tokenizer is the one beside the file: {tokenizer}.")
  else:
    found.settings["data.bpe_vocab_size"] = max(300, found.whole("vocab_size", 0))
    found.notes.append(
      "There is no tokenizer.json beside the file: a BPE is trained on your text. "
      "--config.data.tokenizer=FILE names the model's own."
    )
