"""Folders of datasets, as on the Hugging Face Hub or saved by its package: which files to read.

A file belongs to a split by the card of the dataset (README.md), or else by its name, by the rules
of the package `datasets`: train-00000-of-00002.parquet, data/test.jsonl, validation/a.jsonl.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from absl import logging

from ats_jax.data.text.formats import opening, records, token_files

NAMED = "datasets://"  # see `named_dataset`
CARD = "README.md"
TRAIN, VALIDATION, TEST = "train", "validation", "test"
METADATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
_WORDS = {
  **dict.fromkeys(("train", "training"), TRAIN),
  **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
  **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?\n)---[ \t]*(?:\n|\Z)", re.DOTALL)
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
# A folder of code has files of these suffixes that are no text to train on, as package.json.
_ASKED_FOR = {".json", ".csv", ".tsv"}
# Source code has names of this kind too, which mean something else there.
_PROSE = {".txt", ".text"}
_DATA = {*records.READERS, *token_files.SUFFIXES, *_PROSE}


def choose(
  entry: str, names: Sequence[str], card: str | None, split: str, *, is_folder: bool
) -> dict[str, str]:
  """The files of a folder or glob that are not to be read, each with the reason.

  To train, validation and test splits are left out. To validate, all is read unless there is a
  training split: then the validation split is, or else the test split. JSON and CSV files of a
  folder are read if its card or their names say that they are data. Names of plain texts say
  something only beside a training split.

  Args:
    entry: the folder or glob, for messages.
    names: of its files, relative to it.
    card: path of the dataset's card; None = it has none.
    split: "train" or "validation".
    is_folder: whether the files were found in a folder; else a glob asks for them.

  Raises:
    ValueError: if the card names several configurations and none is the default, or if nothing is
      left to read.
  """
  about = _card(card) if card else {}
  split_of = _by_card(entry, names, about)
  if split_of is None:
    split_of = {name: _by_name(name) for name in names if name != CARD or not about}
    if TRAIN not in split_of.values():  # prose about a test is no test split
      prose = [name for name in split_of if opening.suffix(name) in _PROSE]
      split_of |= dict.fromkeys(prose, "")
  others = {name: "not part of the dataset" for name in names if name not in split_of}
  if is_folder and not about:
    asked_for = [name for name in names if opening.suffix(name) in _ASKED_FOR]
    unasked = [name for name in asked_for if not split_of[name]]
    others |= dict.fromkeys(unasked, "JSON or CSV in a folder of no dataset")
    split_of = {name: kind for name, kind in split_of.items() if name not in others}
    if unasked and not split_of:
      raise ValueError(
        f"paths: {entry!r} holds JSON or CSV files, which of a folder are read only if a dataset's "
        f"{CARD} or a name such as train.json says that they are data. Name them by a glob: "
        f"{_glob_of(entry, unasked[0])}."
      )
  sizes = Counter(split_of.values())
  if split == TRAIN:
    wanted = [kind for kind in sizes if kind not in (VALIDATION, TEST)]
  elif TRAIN in sizes:
    wanted = [next((kind for kind in (VALIDATION, TEST) if kind in sizes), TRAIN)]
  else:
    wanted = list(sizes)
  if split_of and not wanted:
    raise ValueError(
      f"paths: {entry!r} holds nothing to train on but {' and '.join(sorted(sizes))} splits. Name "
      "a file of it to train on that all the same."
    )
  said = lambda kinds: ", ".join(f"{kind or 'of no split'} ({sizes[kind]} files)" for kind in kinds)
  if len(sizes) > 1:
    left_out = [kind for kind in sizes if kind not in wanted]
    hint = " To validate on a split that is left out, name the folder in data.validation_paths too."
    logging.info(
      "%s is a dataset with splits. Read: %s. Left out: %s.%s",
      entry, said(wanted), said(left_out) or "none", hint if split == TRAIN and left_out else "",
    )  # fmt: skip
  for name, kind in split_of.items():
    if kind not in wanted:
      others[name] = f"of the split {kind}"
  return others


def _glob_of(entry: str, name: str) -> str:
  """A glob for a file of a folder and those beside it with the same suffixes."""
  suffixes = "".join(PurePosixPath(name).suffixes[-1 - opening.is_compressed(name) :])
  return os.path.join(entry, os.path.dirname(name), f"*{suffixes}")


def _by_name(name: str) -> str:
  """The split that a file's own name or that of a folder around it says; "" = none."""
  if opening.suffix(name) not in _DATA:
    return ""
  path = PurePosixPath(name)
  for part in (path.name.partition(".")[0], *reversed(path.parts[:-1])):
    for word in _BETWEEN_WORDS.split(part):
      if split := _WORDS.get(word):
        return split
  return ""


def split_of(word: str) -> str:
  """The kind of split that a dataset's own word for it means: "train" of "training"."""
  return _WORDS.get(word, word)


def _by_card(entry: str, names: Sequence[str], card: Mapping[str, Any]) -> dict[str, str] | None:
  """The splits of the files of the card's only or default configuration; None = it has none."""
  configs = card.get("configs")
  if not isinstance(configs, list) or not all(_has_files(config) for config in configs):
    return None
  chosen = [config for config in configs if config.get("default")] or configs
  if len(chosen) > 1:
    chosen = [config for config in configs if config.get("config_name") == "default"]
  if len(chosen) != 1:
    of = ", ".join(str(config.get("config_name")) for config in configs)
    raise ValueError(
      f"paths: {entry!r} is a dataset with the configurations {of}. Name the files of one of them, "
      f"e.g. by a glob; its {CARD} says which they are."
    )
  found: dict[str, str] = {}
  for split, pattern in _patterns(chosen[0]["data_files"]):
    globs = (pattern, pattern.replace("**/", ""))  # `**` may stand for no folder at all
    matching = [
      name
      for name in names
      if any(fnmatchcase(name, glob) for glob in globs) or name.startswith(f"{pattern}/")
    ]
    found |= dict.fromkeys(matching, split_of(split))
  return found or None


def _card(path: str) -> Mapping[str, Any]:
  """What a README.md says of a dataset; {} = it is no dataset's, but a text like others."""
  try:
    with open(path, encoding="utf-8-sig") as file:
      front = _FRONT_MATTER.match(file.read())
  except (OSError, UnicodeDecodeError):  # reported when its text is read
    return {}
  if not front:
    return {}
  import yaml  # here: few folders have a card

  try:
    card = yaml.safe_load(front[1])
  except yaml.YAMLError as e:
    logging.warning("%s is not read as the card of a dataset: %s", path, " ".join(str(e).split()))
    return {}
  return card if isinstance(card, Mapping) and {"configs", "dataset_info"} & card.keys() else {}


def _has_files(config: Any) -> bool:
  return isinstance(config, Mapping) and isinstance(config.get("data_files"), str | list)


def _patterns(data_files: Any) -> Iterable[tuple[str, str]]:
  """(split, glob) of `data_files`, which the Hub takes in three forms."""
  for item in [data_files] if isinstance(data_files, str) else data_files:
    split, globs = (
      (str(item.get("split", TRAIN)), item.get("path", []))
      if isinstance(item, Mapping)
      else (TRAIN, item)
    )
    for pattern in [globs] if isinstance(globs, str) else globs:
      yield split, str(pattern).removeprefix("./")


def saved(folder: str, files: Sequence[str]) -> tuple[Sequence[str], set[str]]:
  """The files of a folder that are data and that are not, if `datasets` saved it; else all.

  Raises:
    ValueError: if it does not say which they are.
  """
  if not {"state.json", "dataset_info.json"}.issubset(files):
    return files, set()
  try:
    with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
      named = [part["filename"] for part in json.load(file)["_data_files"]]
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(
      f"{folder}/state.json of a dataset cannot be read: {e!r}. Save it anew."
    ) from e
  return named, set(files) - {*named, "state.json", "dataset_info.json"}
