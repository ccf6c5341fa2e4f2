"""Models of the Hugging Face Hub, by name: hf://OWNER/NAME or hf://OWNER/NAME@REVISION."""

import os
from pathlib import Path
from typing import cast

from absl import logging

from ats_jax import exits
from ats_jax.bridge.folder import COMPANIONS, INDEX, SINGLE, read_index

SCHEME = "hf://"


def is_name(folder: str | os.PathLike[str]) -> bool:
  """Whether it is a name on the Hub."""
  return os.fspath(folder).startswith(SCHEME)


def local_folder(folder: str) -> str:
  """Return the path of a folder; of a name on the Hub, that of its files on this machine.

  Files are kept in the cache of huggingface_hub (`HF_HOME`), which alone is asked where there is no
  network. Only what the weights' index names is
  fetched, and what stands beside the weights: no second form of them, no pickles.

  Args:
    folder: a path, or a name on the Hub.

  Raises:
    ValueError: for a name that the Hub does not know or does not give, or a repository without
      safetensors.
    FaultError: if the Hub does not answer and the files are not in the cache.
  """
  if not is_name(folder):
    return folder
  name, _, revision = folder.removeprefix(SCHEME).partition("@")
  if name.count("/") != 1 or not all(name.split("/")):
    raise ValueError(f"{folder} is no name on the Hub. Example: {SCHEME}Qwen/Qwen3-0.6B@main")
  files = _fetch(folder, name, revision or "main", [*COMPANIONS, INDEX])
  weights = [SINGLE]
  if (files / INDEX).is_file():
    weights = sorted(set(read_index(files).values()))
  _fetch(folder, name, files.name, weights)  # of the same commit
  if not any((files / weight).is_file() for weight in weights):
    raise ValueError(
      f"{folder} has neither {INDEX} nor {SINGLE}. Other files of weights are not read; pickles "
      "(.bin, .pt) can run any program."
    )
  logging.info("%s is commit %s", folder, files.name)
  return str(files)


def _fetch(folder: str, name: str, revision: str, patterns: list[str]) -> Path:
  import huggingface_hub as hub  # here: it takes a quarter of a second
  from huggingface_hub import errors

  # Its HTTP library's own error, whichever library that is.
  unreachable = cast("type[Exception]", errors.HfHubHTTPError.__mro__[1])
  try:
    return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
  except errors.GatedRepoError as e:
    raise ValueError(
      f"{folder} is given to those who accept its terms. Accept them on its page, then log in: "
      "hf auth login, or HF_TOKEN=..."
    ) from e
  except errors.RepositoryNotFoundError as e:
    raise ValueError(
      f"{folder}: the Hub has no such model, or you may not see it. Look for a slip in the name; "
      "for a private one log in: hf auth login, or HF_TOKEN=..."
    ) from e
  except errors.RevisionNotFoundError as e:
    raise ValueError(f"{folder}: the model has no branch, tag or commit {revision}.") from e
  except errors.HFValidationError as e:
    raise ValueError(f"{folder} is no name on the Hub: {e}") from e
  except (errors.LocalEntryNotFoundError, unreachable) as e:
    message = str(e).splitlines()[0].rstrip(". ")
    raise exits.FaultError(
      f"{folder}: the Hub does not answer, and the files are not all in the cache: {message}. Try "
      "again: files that have come are kept."
    ) from e
