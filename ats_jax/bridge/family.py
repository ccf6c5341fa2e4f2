"""The rows of a family's tables: for its weights, and for the fields of its config.json."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ats_jax.bridge.transforms import SAME, Interleaved, Shape, Transform, in_order
from ats_jax.config.names import all_settings, default_of, flatten, settings
from ats_jax.config.schema import Config
from ats_jax.model.layer_kinds import layer_kinds

Values = Mapping[str, Any]
EXPERT = "{expert}"
_NEEDED = object()


@dataclasses.dataclass(frozen=True)
class WeightRow:
  """One of our arrays, and the tensors of a Hugging Face folder that hold its values.

  Attributes:
    ours: path of the array in the model, by layer, e.g. "layers/{layer}/attn/q".
    theirs: name of their tensor. With {expert} there is one for each index of our first dimension.
      Rows of several arrays that share a tensor stand next to each other in the table.
    transform: the bijection between the two arrays; with {expert}, between those of one expert.
    wide: whether their tensor is in float32, whatever dtype the others have.
  """

  ours: str
  theirs: str
  transform: Transform | Interleaved
  wide: bool = False

  def names(self, tensor: str) -> bool:
    """Whether the tensor of this name belongs to the row."""
    pattern = re.escape(self.theirs).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
    return re.fullmatch(pattern, tensor) is not None


@dataclasses.dataclass(frozen=True)
class OwnWeight:
  """One of our arrays for which a Hugging Face model has no tensor.

  Attributes:
    ours: path of the array in the model, by layer.
    value: maps its shape to its value after an import.
    needed: whether an export is refused if the array has another value.
    counts_from_last: whether a number that all of its last dimension share changes nothing.
  """

  ours: str
  value: Callable[[Shape], np.ndarray]
  needed: bool
  counts_from_last: bool = False

  def is_met_by(self, array: np.ndarray) -> bool:
    """Whether a model without the array computes what one with it does."""
    if not self.needed:
      return True
    if self.counts_from_last:
      array = array - array[..., -1:]
    return np.array_equal(array, self.value(array.shape).astype(array.dtype))


class FieldRow(Protocol):
  """A row of a family's table of fields: some fields of config.json, and the settings they mean."""

  @property
  def keys(self) -> tuple[str, ...]:
    """The fields of config.json that this row reads and writes."""
    ...

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name.

    Raises:
      ValueError: if a field has a value that this program does not support.
    """
    ...

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    ...


@dataclasses.dataclass(frozen=True)
class SettingField:
  """A field of config.json that is one of our settings, with the same value.

  Attributes:
    theirs: key in config.json.
    ours: dotted name of the setting.
    default: the value that `transformers` uses if the field is missing; without a default that is
      an error.
    null: the value of the setting that null stands for; without one, null is an error.
  """

  theirs: str
  ours: str
  default: Any = _NEEDED
  null: Any = _NEEDED

  @property
  def keys(self) -> tuple[str, ...]:
    """The fields of config.json that this row reads and writes."""
    return (self.theirs,)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    value = theirs.get(self.theirs, self.default)
    if value is None:
      value = self.null
    if value is _NEEDED:
      raise ValueError(f"{self.theirs} is missing in config.json.")
    kind: Any = all_settings()[self.ours][0].field.type
    if type(value) not in ((int, float) if kind is float else (kind,)):
      raise ValueError(f"{self.theirs} is {value!r} in config.json, expected {kind.__name__}.")
    return {self.ours: value}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    value = flatten(cfg)[self.ours]
    return {self.theirs: None if self.null is not _NEEDED and value == self.null else value}


@dataclasses.dataclass(frozen=True)
class FixedField:
  """A field of which this program supports one value only; another one is refused.

  Attributes:
    theirs: key in config.json.
    value: the supported value, which a missing field means too.
    ours: settings that the value stands for, by dotted name.
    lack: why there is no other one, for the message.
  """

  theirs: str
  value: Any
  ours: tuple[tuple[str, Any], ...] = ()
  lack: str = ""

  @property
  def keys(self) -> tuple[str, ...]:
    """The fields of config.json that this row reads and writes."""
    return (self.theirs,)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    value = theirs.get(self.theirs, self.value)
    if value != self.value and (value or self.value):  # null and false are one
      lack = f": {self.lack}" if self.lack else ""
      raise ValueError(
        f"{self.theirs} is {value!r} in config.json, and this program has only {self.value!r}"
        f"{lack}."
      )
    return dict(self.ours)

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    del cfg
    return {self.theirs: self.value}


@dataclasses.dataclass(frozen=True)
class ImpliedSettings:
  """Settings that all models of a family have, without a field of config.json that says so.

  Attributes:
    ours: values of the settings, by dotted name.
    keys: fields of config.json, as of `FieldRow`: none.
  """

  ours: tuple[tuple[str, Any], ...]
  keys: tuple[str, ...] = ()

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    del theirs
    return dict(self.ours)

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    del cfg
    return {}


def read_row(row: FieldRow, theirs: Values) -> Values:
  """What a row reads, whatever the values are.

  Raises:
    ValueError: as `FieldRow.read` does, and for a field that is missing or of another type.
  """
  try:
    return row.read(theirs)
  except KeyError as e:
    raise ValueError(f"{e.args[0]} is missing in config.json.") from e
  except (TypeError, AttributeError, ArithmeticError) as e:
    fields = ", ".join(row.keys) or "a field"
    raise ValueError(f"{fields} of config.json cannot be read: {e}") from e


def _mean_the_same(row: FieldRow, one: Values, other: Values) -> bool:
  try:
    settings = read_row(row, one), read_row(row, other)
  except ValueError:  # another version of this program has imported it
    return False
  usual = {name: default_of(name, all_settings()[name][0].field) for of in settings for name in of}
  return {**usual, **settings[0]} == {**usual, **settings[1]}


def contradiction(settings: Values) -> str:
  """Why this program has not what rows read each by itself; empty if it has."""
  if settings.get("moe.top_k") == 1 and settings.get("moe.renormalize"):
    return "the weight of one expert is not divided by itself here; top_k must be more."
  return ""


def without_unused_experts(settings: Values) -> dict[str, Any]:
  """Settings of a model in which some layer has experts, or else of the dense model that it is.

  `transformers` builds a mixture of experts without one: all layers of DeepSeek may be dense.
  """
  first_sparse = settings.get("moe.dense_first", 0) + settings.get("moe.every", 1)
  if not settings.get("moe.num_experts") or first_sparse <= settings["model.num_layers"]:
    return dict(settings)
  dense = {name: value for name, value in settings.items() if not name.startswith("moe.")}
  return {**dense, "moe.num_experts": 0}


# Fields of config.json that any model may have, and that bear on nothing here: an import and a run
# from scratch pass over them, and an export gives back those of the import.
CARRIED = frozenset(
  [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "max_position_embeddings",
    "pretraining_tp",
    "id2label",
    "label2id",
    "problem_type",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "cache_implementation",
    # Of experts: a configuration class writes them whatever the model has.
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "is_llama_config",
    "max_window_layers",  # of windows, which `use_sliding_window` turns on
  ]
)
# Of the programs that saved a model: how they load and run it. An export leaves them out, as it
# does all names that begin with "_".
OF_PROGRAMS = frozenset(["auto_map", "attn_implementation", "unsloth_fixed", "unsloth_version"])
# Fields of variants of a family that change nothing while they have this value.
NEUTRAL: Mapping[str, Any] = {"use_mrope": False, "rope_interleaved": False}
# What an export writes itself.
WRITTEN = frozenset(
  ["architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"]
)


# Rows of `Family.training` that most families have.
TRAINING: tuple[FieldRow, ...] = (
  SettingField("initializer_range", "model.init_std", 0.02, null=0.02),
  FixedField("attention_dropout", 0.0),
)


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models: how its weights and its config.json are ours.

  Attributes:
    name: in messages and documents.
    model_type: in config.json.
    architecture: the class of the model, the `architectures` of config.json.
    rows: every array of ours is in exactly one.
    fields: every field of config.json that says what is computed.
    training: fields that say how the model is trained, and change nothing that it computes: a run
      from scratch takes them, an import passes over them, and an export gives them back.
    ignored: patterns of tensors that hold nothing of their own.
    fitted_rows: rows that depend on a model's settings.
    aside: pattern of the tensors that no model here has, for a config.json; an import leaves them
      and says so.
    files: returns further files of an export, by name.
    empty: shapes of tensors without elements that `transformers` looks for, by name, for our
      settings.
    rates: whether `transformers` has a class of it that rates texts.
  """

  name: str
  model_type: str
  architecture: str
  rows: tuple[WeightRow | OwnWeight, ...]
  fields: tuple[FieldRow, ...]
  training: tuple[FieldRow, ...] = TRAINING
  ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
  fitted_rows: Callable[[Values], tuple[WeightRow, ...]] = lambda _: ()
  aside: Callable[[Values], str] = lambda _: ""
  files: Callable[[], Mapping[str, str]] = lambda: {}
  empty: Callable[[Values], Mapping[str, Shape]] = lambda _: {}
  rates: bool = True

  @property
  def carried(self) -> frozenset[str]:
    """Fields of config.json that an import passes over and an export gives back."""
    return CARRIED | {key for row in self.training for key in row.keys}

  def fitted(self, settings: Values) -> "Family":
    """This family with all rows for a model of these settings, by dotted name."""
    return dataclasses.replace(
      self, rows=(*self.rows, *self.fitted_rows(settings)), fitted_rows=lambda _: ()
    )

  def rating(self) -> "Family":
    """This family with the head of a model that rates texts.

    Raises:
      ValueError: if `transformers` has no such class.
    """
    if not self.rates:
      raise ValueError(
        f"{self.name} models of transformers predict tokens only, and this run has step.loss="
        "reward, whose model rates texts."
      )
    rows = (row for row in self.rows if row.ours != "head")
    return dataclasses.replace(
      self,
      architecture=self.architecture.replace("ForCausalLM", "ForSequenceClassification"),
      rows=(*rows, WeightRow("head", "score.weight", SAME)),
    )

  def read(self, theirs: Values, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Our settings for a config.json, by dotted name.

    Args:
      theirs: the fields of config.json.
      ignored: unknown fields that change nothing, as the user says.

    Raises:
      ValueError: naming the field that this program cannot follow.
    """
    settings: dict[str, Any] = {}
    for row in self.fields:
      settings.update(read_row(row, theirs))
    if why := contradiction(settings):
      raise ValueError(why)
    decisive = {key for row in self.fields for key in row.keys}
    for key in ignored:
      if key in decisive or key not in theirs:
        what = "decides what the model computes" if key in decisive else "is not in config.json"
        raise ValueError(f"--ignore_fields={key}: {key} {what}.")
    unknown = set(theirs) - decisive - WRITTEN - {*self.passed_over(theirs), *ignored}
    for key in sorted(unknown):
      raise ValueError(
        f"{key} is {theirs[key]!r} in config.json, and this program does not know whether it "
        f"changes what a {self.name} model computes. --ignore_fields={','.join(sorted(unknown))} "
        "imports the model as if it did not; bridge verify compares it with transformers."
      )
    return without_unused_experts(settings)

  def passed_over(self, theirs: Values) -> list[str]:
    """Fields of a config.json that are known to change nothing that is computed."""
    decisive = WRITTEN | {key for row in self.fields for key in row.keys}
    return [
      key
      for key, value in theirs.items()
      if key not in decisive
      and (
        key in self.carried | OF_PROGRAMS
        or key.startswith("_")
        or (key in NEUTRAL and value in (NEUTRAL[key], None))
      )
    ]

  def write(self, cfg: Config) -> dict[str, Any]:
    """The fields of config.json for a resolved config."""
    fields: dict[str, Any] = {
      "architectures": [self.architecture],
      "model_type": self.model_type,
    }
    for row in self.fields:
      fields.update(row.write(cfg))
    return fields

  def write_again(self, cfg: Config, theirs: Values) -> dict[str, Any]:
    """As `write`, with the fields of an import: those it carries, and those that mean the same.

    Args:
      cfg: a resolved config.
      theirs: the config.json of the import; empty without one.
    """
    comes_back = lambda key: key in self.carried or (key, theirs[key]) in NEUTRAL.items()
    fields = {**{key: theirs[key] for key in theirs if comes_back(key)}, **self.write(cfg)}
    if theirs.get("model_type") != self.model_type:
      return fields
    for row in self.fields:
      if _mean_the_same(row, theirs, fields):
        fields |= {key: theirs[key] for key in row.keys if key in theirs and key in fields}
    return fields


def architecture(cfg: Config) -> dict[str, Any]:
  """The settings of a resolved config that decide what its model computes, by dotted name.

  What may change on resume decides nothing of it, and neither does what is for training alone.
  """
  flat, fields = flatten(cfg), settings(cfg)
  is_decisive = lambda of: not of["training"] and of["resume"] == "fixed"
  sections = {"model"} | ({"moe"} if cfg.moe.num_experts else set())
  sections |= {"mod"} if cfg.mod.routing != "none" else set()
  decisive = {
    name: flat[name]
    for name, field in fields.items()
    if name.split(".")[0] in sections and is_decisive(field.metadata)
  }
  decisive |= {name: flat[name] for name in ("moe.num_experts", "mod.routing")}
  if cfg.moe.num_experts:
    decisive["moe.renormalize"] = cfg.moe.renormalize and cfg.moe.top_k > 1
    if all(kind.moe for kind in layer_kinds(cfg)):
      decisive.pop("model.d_ff")
  return decisive


@dataclasses.dataclass(frozen=True)
class Item:
  """One of our arrays in a given model, and the tensors that it is.

  Attributes:
    ours: name of our array in a checkpoint, without the root.
    shape: shape of our array.
    row: the row of the table that joins the two.
    theirs: names of the tensors; none for an `OwnWeight`.
    their_shape: shape of each of their tensors.
  """

  ours: str
  shape: Shape
  row: WeightRow | OwnWeight
  theirs: tuple[str, ...]
  their_shape: Shape


def match_weights(family: Family, shapes: Mapping[str, Shape]) -> list[Item]:
  """The plan for a model: an item for each of our arrays, layer by layer, in the order of rows.

  Args:
    family: whose tables.
    shapes: shapes of our arrays, by name.

  Raises:
    ValueError: if one of them is in no row.
  """
  planned = [_item(family, name, shape) for name, shape in shapes.items()]
  return sorted(planned, key=lambda item: (_place(item.ours), family.rows.index(item.row)))


def together(planned: Sequence[Item]) -> list[list[Item]]:
  """A plan cut into the arrays that share their tensors: mostly one by one."""
  return [list(group) for _, group in itertools.groupby(planned, lambda i: i.theirs or i.ours)]


def _item(family: Family, name: str, shape: Shape) -> Item:
  for row in family.rows:
    match = re.fullmatch(row.ours.replace("{layer}", r"(\d+)"), name)
    if match is None or (EXPERT in getattr(row, "theirs", "") and len(shape) != 3):
      continue  # a dense layer's arrays have the names of experts' and a dimension less
    if isinstance(row, OwnWeight):
      return Item(name, shape, row, (), ())
    theirs = row.theirs.replace("{layer}", match[1] if match.groups() else "")
    if EXPERT in theirs:
      names = tuple(theirs.replace(EXPERT, str(e)) for e in range(shape[0]))
      return Item(name, shape, row, names, row.transform.their_shape(shape[1:]))
    return Item(name, shape, row, (theirs,), row.transform.their_shape(shape))
  raise ValueError(f"{family.name} models have nothing like {name} {list(shape)}.")


def _place(name: str) -> tuple[int, int]:
  """Embedding, layers, then what follows them."""
  match = re.match(r"layers/(\d+)/", name)
  if match:
    return 1, int(match[1])
  return (0, 0) if name.startswith("embed") else (2, 0)


def to_theirs(
  group: Sequence[Item], read: Callable[[Item], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of our arrays, by name.

  Args:
    group: items that share tensors, as `together` groups them.
    read: gives one of our arrays; one is in memory at a time.

  Raises:
    ValueError: if they have no such array and its value matters.
  """
  item, row = group[0], group[0].row
  if isinstance(row, OwnWeight):
    if not row.is_met_by(read(item)):
      raise ValueError(
        f"{item.ours} is not what it begins with, and the family has nothing for it. Train with "
        "moe.bias_update=none."
      )
  elif isinstance(row.transform, Interleaved):
    assert len(group) == row.transform.of, item.theirs
    yield item.theirs[0], _joined(group, read)
  else:
    array = read(item)
    parts = array if len(item.theirs) > 1 or EXPERT in row.theirs else (array,)
    for name, part in zip(item.theirs, parts, strict=True):
      yield name, row.transform.to_theirs(part)


def _joined(group: Sequence[Item], read: Callable[[Item], np.ndarray]) -> np.ndarray:
  theirs = None
  for item in group:
    array = read(item)
    theirs = np.empty(item.their_shape, array.dtype) if theirs is None else theirs
    assert isinstance(item.row, WeightRow) and isinstance(item.row.transform, Interleaved)
    item.row.transform.put(array, theirs)
    del array  # before the next one is read
  assert theirs is not None
  return theirs


def to_ours(item: Item, tensors: Callable[[str], np.ndarray], dtype: np.dtype) -> np.ndarray:
  """One of our arrays, in its own memory, of the tensors that it is; one of them at a time."""
  row = item.row
  if isinstance(row, OwnWeight):
    return np.broadcast_to(row.value(item.shape), item.shape).astype(dtype)
  if EXPERT not in row.theirs:
    array = row.transform.to_ours(tensors(item.theirs[0]), item.shape)
    return in_order(array).astype(dtype, copy=False)
  stack = np.empty(item.shape, dtype)
  for place, name in enumerate(item.theirs):
    stack[place] = in_order(row.transform.to_ours(tensors(name), item.shape[1:]))
  return stack


def shorten_names(sequence: Sequence[str], most: int = 4) -> str:
  """Return the first names of a sequence and how many more there are, for a message."""
  shown = ", ".join(sequence[:most])
  return f"{shown} and {len(sequence) - most} more" if len(sequence) > most else shown
