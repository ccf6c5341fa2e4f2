"""Datasets by name, through the package `datasets`: datasets://OWNER/NAME?config=en&split=train.

The package downloads a dataset and writes it as Arrow files into its own cache (`HF_HOME`), which
are read there like any others. A local folder is datasets:///path/to/folder.
"""

import os
import urllib.parse
from typing import Any

from absl import logging

from ats_jax import exits
from ats_jax.data.text import hub_dataset
from ats_jax.data.text.formats import extra
from ats_jax.store.secrets import masked

_OPTIONS = ("config", "split")
_FORM = f"Expected {hub_dataset.NAMED}OWNER/NAME?config=...&split=..., each part if wanted"


def files(entry: str, split: str) -> list[tuple[str, str]]:
  """(path, name) of the Arrow files of a split, downloaded and written on first use.

  Args:
    entry: the name.
    split: "train" or "validation": the split to read where the name says none; to validate, the
      test split serves where there is no other.

  Raises:
    ValueError: if the package is not installed, or the dataset, configuration or split is unknown.
    FaultError: if the dataset cannot be reached.
  """
  name, options = _parts(entry)
  builder = _prepared(entry, name, options)
  sizes = {kind: info.num_examples for kind, info in builder.info.splits.items()}
  by_kind = {hub_dataset.split_of(kind): kind for kind in reversed(sizes)}
  wanted = [split] if split == hub_dataset.TRAIN else [split, hub_dataset.TEST]
  chosen = options.get("split") or next((by_kind[kind] for kind in wanted if kind in by_kind), "")
  if chosen not in sizes:
    raise ValueError(
      f"paths: {entry!r} has no split {chosen or split!r}. It has: {', '.join(sizes)}. Name one of "
      "them by split=."
    )
  logging.info(
    "%s: configuration %s, split %s, %s rows; its splits are %s.",
    masked(entry), builder.config.name, chosen, f"{sizes[chosen]:,}", ", ".join(sizes),
  )  # fmt: skip
  found = [file["filename"] for file in builder.as_dataset(chosen).cache_files]
  place = f"{name.strip('/')}/{builder.config.name}/{chosen}"
  return [(path, f"{place}/{os.path.basename(path)}") for path in found]


def _parts(entry: str) -> tuple[str, dict[str, str]]:
  name, _, query = entry.removeprefix(hub_dataset.NAMED).partition("?")
  options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
  if not name:
    raise ValueError(f"paths: {entry!r} names no dataset. {_FORM}.")
  if unknown := [option for option in options if option not in _OPTIONS]:
    raise ValueError(f"paths: {entry!r} has the unknown part {unknown[0]!r}. {_FORM}.")
  return name, options


def _prepared(entry: str, name: str, options: dict[str, str]) -> Any:
  """The package's builder of a configuration, whose files are there."""
  datasets = extra.import_extra("datasets", entry, "datasets")
  try:
    builder = datasets.load_dataset_builder(name, options.get("config"))
    builder.download_and_prepare()
  except FileNotFoundError as e:  # also of a dataset that the Hub does not know or give
    raise ValueError(f"paths: {entry!r}: {_first_line(e)}") from e
  except ValueError as e:  # of the configuration; the names of all follow in other lines
    raise ValueError(f"paths: {entry!r}: {' '.join(str(e).split())}") from e
  except (OSError, datasets.exceptions.DatasetsError) as e:
    raise exits.FaultError(f"paths: {entry!r} cannot be read: {_first_line(e)}") from e
  return builder


def _first_line(e: Exception) -> str:
  return next(iter(str(e).splitlines()), type(e).__name__)
