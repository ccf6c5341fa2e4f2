"""A Hugging Face folder: which family it is, its settings, where its tensors lie."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from ats_jax.bridge import fp8_blocks, mxfp4
from ats_jax.bridge.families import KNOWN
from ats_jax.bridge.family import (
  Family,
  Item,
  Values,
  WeightRow,
  architecture,
  shorten_names,
)
from ats_jax.bridge.safetensors_file import DTYPES, Stored, read_header
from ats_jax.config.build import unchecked
from ats_jax.config.names import to_dict
from ats_jax.config.schema import Config
from ats_jax.config.tree import updated
from ats_jax.store import paths

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"  # of weights in several files
SINGLE = "model.safetensors"  # weights in one file
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the first that is there is taken
# What an import keeps beside the weights and an export gives back.
COMPANIONS = (
  CONFIG,
  *TOKENIZERS,
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
  """A Hugging Face folder whose model this program can import.

  Attributes:
    folder: its path.
    family: the tables of names and fields that its model follows, with all rows of this model.
    fields: the content of its config.json.
    settings: the settings of this program that the fields stand for, by dotted name.
    tensors: the weights to import, by their name in the folder; read when they are needed.
    aside: names of the tensors that an import leaves out, as no model here has them.
    ignored: fields of its config.json that change nothing, as the user says.
  """

  folder: Path
  family: Family
  fields: Values
  settings: Mapping[str, Any]
  tensors: Mapping[str, Stored]
  aside: tuple[str, ...] = ()
  ignored: tuple[str, ...] = ()

  @property
  def dtype(self) -> str:
    """What holds all values of its tensors, in the words of the format: theirs, or "F32".

    But for those of rows that are always in float32.
    """
    wide = [row for row in self.family.rows if isinstance(row, WeightRow) and row.wide]
    is_wide = lambda name: any(row.names(name) for row in wide)
    dtypes = {tensor.dtype for name, tensor in self.tensors.items() if not is_wide(name)}
    return dtypes.pop() if len(dtypes) == 1 else "F32"

  @property
  def fingerprint(self) -> str:
    """A hash of all that says what is in the files, without their bytes."""
    digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode())
    for name, tensor in sorted(self.tensors.items()):
      stat = tensor.path.stat()
      digest.update(f"{name} {tensor} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()

  def log_what_is_left(self) -> None:
    """Name the fields and tensors that bear on nothing here."""
    if fields := [*self.family.passed_over(self.fields), *self.ignored]:
      logging.info("%s/%s: without a bearing here: %s", self.folder, CONFIG, ", ".join(fields))
    if self.aside:
      names = shorten_names(self.aside)
      logging.warning(
        "%s: left aside, as no model here has them: %d tensors, %s",
        self.folder, len(self.aside), names,
      )  # fmt: skip

  def check(self, cfg: Config, items: Iterable[Item]) -> None:
    """See that the files hold what a model needs, and nothing else.

    Args:
      cfg: the resolved config of the model.
      items: the arrays that it needs, with their tensors.

    Raises:
      ValueError: naming the setting or tensor that does not fit.
    """
    self.check_settings(cfg)
    needed = {name: item for item in items for name in item.theirs}
    if missing := sorted(needed.keys() - self.tensors.keys()):
      raise ValueError(
        f"{self.folder} misses {len(missing)} tensors of a {self.family.name} model: "
        f"{shorten_names(missing)}. Copy the folder again, with all its files."
      )
    is_ignored = lambda name: any(re.fullmatch(p, name) for p in self.family.ignored)
    holds_any = lambda name: 0 not in self.tensors[name].shape and not is_ignored(name)
    extra = [n for n in sorted(self.tensors.keys() - needed.keys()) if holds_any(n)]
    if extra and not self._is_tied_copy(extra):
      raise ValueError(
        f"{self.folder} holds {len(extra)} tensors that a {self.family.name} model of its "
        f"config.json has not: {shorten_names(extra)}."
      )
    for name, item in needed.items():
      tensor = self.tensors[name]
      if tensor.dtype not in DTYPES:
        raise ValueError(
          f"{tensor.path}: tensor {name} is in {tensor.dtype}, expected one of "
          f"{', '.join(DTYPES)}. Save the model in one of them first."
        )
      if tensor.shape != item.their_shape:
        raise ValueError(
          f"{tensor.path}: tensor {name} is {list(tensor.shape)}, and config.json says "
          f"{list(item.their_shape)}."
        )

  def check_settings(self, cfg: Config) -> None:
    """See that a resolved config has the folder's model.

    Raises:
      ValueError: naming each setting that differs, and its value for this folder.
    """
    wanted, own = architecture(cfg), architecture_of(self.settings, cfg)
    lines = [
      f"--config.{name}={own[name]} (here {wanted.get(name)!r})"
      for name in own
      if own[name] != wanted.get(name)
    ]
    if lines:
      settings = "\n  ".join(lines)
      raise ValueError(
        f"{self.folder} is another model than that of the settings. It needs:\n  {settings}"
      )

  def _is_tied_copy(self, extra: list[str]) -> bool:
    """Whether what is left is the head of a tied model, written out."""
    table = self.tensors.get("model.embed_tokens.weight")
    if extra != ["lm_head.weight"] or table is None:
      return False
    return np.array_equal(_bits(self.tensors[extra[0]].read()), _bits(table.read()))


def _bits(array: np.ndarray) -> np.ndarray:
  return array.view(np.uint8)


def architecture_of(settings: Mapping[str, Any], cfg: Config) -> dict[str, Any]:
  """What `family.architecture` would say of a config with these settings."""
  settings = {"mod.routing": "none", **settings}
  of_model = {n: v for n, v in settings.items() if n.partition(".")[0] in ("model", "moe", "mod")}
  return architecture(unchecked(updated(to_dict(cfg), of_model)))


def is_model_folder(folder: os.PathLike[str]) -> bool:
  """Whether a local folder holds a Hugging Face model, by its config.json."""
  if paths.is_remote(folder):
    return False
  try:
    fields = paths.parse_json((Path(folder) / CONFIG).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return False
  return isinstance(fields, dict) and "model_type" in fields


def open_model_folder(folder: os.PathLike[str], ignored: Collection[str] = ()) -> ModelFolder:
  """Read config.json and the headers of all weight files, not the weights themselves.

  Args:
    folder: a Hugging Face folder.
    ignored: fields of its config.json that are unknown here and change nothing, as the user says.

  Raises:
    ValueError: for a folder that is no Hugging Face model, an unknown architecture, or files that
      are missing or damaged; the message names the file.
  """
  folder = Path(folder)
  fields = read_json(folder / CONFIG)
  kind = str(fields.get("model_type"))
  if kind not in KNOWN:
    raise ValueError(
      f"{folder / CONFIG}: model_type is {kind!r}, and the families here are {', '.join(KNOWN)}."
    )
  family = KNOWN[kind]
  try:
    settings = family.read(fields, ignored)
  except ValueError as e:
    raise ValueError(f"{folder}: {e}") from e
  tensors = _joined(_tensors(folder), fields)
  aside = tuple(n for n in sorted(tensors) if re.fullmatch(family.aside(fields), n))
  used = {name: tensor for name, tensor in tensors.items() if name not in set(aside)}
  table = family.fitted(settings)
  return ModelFolder(folder, table, fields, settings, used, aside, tuple(ignored))


def _joined(tensors: Mapping[str, Stored], fields: Values) -> Mapping[str, Stored]:
  """The tensors of a folder, those in another format each together with its scales."""
  quantization = fields.get("quantization_config") or {}
  if quantization.get("quant_method") == mxfp4.METHOD:
    return mxfp4.joined(tensors)
  return fp8_blocks.joined(tensors, fields)


def read_json(path: Path) -> dict[str, Any]:
  """The object in a file of somebody's folder.

  Raises:
    ValueError: if it cannot be read, or holds no object.
  """
  try:
    value = paths.parse_json(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as e:
    raise ValueError(f"{path} cannot be read: {e}. Expected a folder of Hugging Face's.") from e
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds {value!r:.40}, not a JSON object.")
  return value


def read_index(folder: Path) -> dict[str, str]:
  """The file of each tensor of a folder with several."""
  by_name = read_json(folder / INDEX).get("weight_map") or {}
  if not isinstance(by_name, dict) or not all(isinstance(n, str) for n in by_name.values()):
    raise ValueError(f"{folder / INDEX}: weight_map is not an object of names of files.")
  return by_name


def _tensors(folder: Path) -> dict[str, Stored]:
  by_name = read_index(folder) if (folder / INDEX).exists() else {}
  if (folder / SINGLE).is_file() and SINGLE not in by_name.values():
    if by_name:  # of an older save: transformers takes the whole file too
      logging.warning(
        "%s: %s is read, and %s, which does not name it, is not", folder, SINGLE, INDEX
      )
    by_name, files = {}, [SINGLE]
  elif (folder / INDEX).exists():
    files = sorted(set(by_name.values()))
    for name in files:
      if not (folder / name).is_file() or Path(name).name != name:
        first = next(tensor for tensor, file in by_name.items() if file == name)
        raise ValueError(f"{folder} misses {name}, which {INDEX} names for {first} and others.")
  else:
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt*")))
    hint = (
      f" It has {shorten_names(pickles)}: pickles can run any program and are not read. Save the "
      "model with safe_serialization=True first."
      if pickles
      else ""
    )
    raise ValueError(f"{folder} holds neither {INDEX} nor {SINGLE}.{hint}")
  all_tensors: dict[str, Stored] = {}
  for name in files:
    tensors = read_header(folder / name)
    if twice := sorted(all_tensors.keys() & tensors.keys()):
      raise ValueError(f"{folder}: tensor {twice[0]} is in {name} and in another file.")
    all_tensors |= tensors
  for tensor, file in by_name.items():
    if tensor not in all_tensors or all_tensors[tensor].path.name != file:
      raise ValueError(f"{folder}: {file} does not hold tensor {tensor}, as {INDEX} says.")
  return all_tensors


def tokenizer_in(folder: os.PathLike[str]) -> paths.Path | None:
  """The tokenizer of a folder, if it holds one."""
  candidates = (paths.parse(folder) / name for name in TOKENIZERS)
  return next((path for path in candidates if path.is_file()), None)


def copy_companions(source: os.PathLike[str], target: os.PathLike[str]) -> None:
  """Copy what stands beside the weights; either may be on a store.

  Raises:
    ValueError: if a file is a link to somewhere else, whose content nobody means to publish.
  """
  origin, copies = paths.parse(source), paths.parse(target)
  paths.make_folder(copies)
  for name in COMPANIONS:
    if (origin / name).is_file():
      if not paths.is_remote(origin) and not _is_in(origin / name, origin):
        raise ValueError(f"{origin / name} is a link out of its folder. Copy the file instead.")
      paths.write(copies / name, paths.read(origin / name))


def _is_in(path: paths.Path, folder: paths.Path) -> bool:
  """Whether a file is in a folder, or where Hugging Face's cache keeps the files of its folders."""
  real, homes = os.path.realpath(path), [os.path.realpath(folder)]
  if folder.parent.name == "snapshots":
    homes.append(os.path.realpath(folder.parent.parent / "blobs"))
  return any(os.path.commonpath([real, home]) == home for home in homes)


def imported_fields(companions: paths.Path) -> dict[str, Any]:
  """The config.json that an import kept; empty without one."""
  file = companions / CONFIG
  return paths.parse_json(paths.read(file)) if file.is_file() else {}
