"""Inputs on a store (gs://, s3://, hf://, https://, ...): copied into the cache, read there.

So every format can be read, memory-mapped and hashed, and a run reads a file once from the network.
A copy is used as long as the store says that the object is the same: by its etag or checksum, or
else by size and time.
"""

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
from absl import logging

from ats_jax import exits
from ats_jax.data.corpus import cache
from ats_jax.store import paths

# What names a version of an object, by the words of the stores; the first that is known is used.
_VERSIONS = ("etag", "ETag", "md5Hash", "crc32c", "sha256", "blob_id", "content_md5", "checksum")
_COPY_PREFIX = "copy-"  # of the names of folders with copies
_TIMES = ("mtime", "updated", "LastModified", "last_modified", "last-modified", "created")
_WRONG_NAME = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_MISSING = (404, 410)  # what HTTP says of no such file
_EXPECTED = "Expected a local path, or an address like gs://, s3://, hf:// or https://."
_EXTRAS = {
  "gs": "gs",
  "gcs": "gs",
  "s3": "s3",
  "az": "az",
  "abfs": "az",
  "hf": "hf",
} | dict.fromkeys(("http", "https"), "http")


class RemoteFile(NamedTuple):
  """A file on a store."""

  store: fsspec.AbstractFileSystem
  url: str
  name: str


def listed(entry: str) -> list[RemoteFile]:
  """The files that `entry` names: a file, a folder or a glob with a protocol; at least one.

  Raises:
    ValueError: if the store is unknown, or there is no such file.
    FaultError: if the store does not answer.
  """
  store, place = _store(entry)
  with _named_errors(entry):
    try:
      files = [RemoteFile(store, url, name) for url, name in _listed(store, place)]
    except (NotImplementedError, ValueError) as e:  # data:// and others that are no file systems
      why = f": {e}" if str(e) else ""
      raise ValueError(f"{entry} names no files that can be listed{why}. {_EXPECTED}") from e
  if not files:
    raise ValueError(f"paths: {entry!r} does not exist, or matches no file.")
  return files


def copied(file: RemoteFile, root: Path) -> str:
  """The path of a local copy, which is made if there is none of this version.

  Args:
    file: to copy.
    root: root of the cache.

  Raises:
    ValueError: if there is no such file.
    FaultError: if the store does not answer.
  """
  with _named_errors(file.url, "read"):
    return _copy(file.store, file.url, file.store.info(file.url), file.name, root)


def version(url: str) -> tuple[int, str]:
  """The bytes of a file, 0 if the store does not say, and what names its version.

  Raises:
    ValueError: if there is no such file.
    FaultError: if the store does not answer.
  """
  with _named_errors(url):
    store, path = _store(url)
    info = store.info(path)
  return info.get("size") or 0, cache.digest(_version(info))


def url_of(file: RemoteFile) -> str:
  """Its address with the protocol."""
  return file.store.unstrip_protocol(file.url)


@contextlib.contextmanager
def local_copy(url: str, name: str, folder: Path) -> Iterator[str]:
  """Copy a file of a store into `folder` for the length of a block; gives the path of the copy.

  Raises:
    ValueError: if there is no such file.
    FaultError: if the store does not answer.
  """
  place = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX, dir=folder))
  try:
    with open(place / "lock", "w") as lock:
      fcntl.flock(lock, fcntl.LOCK_SH)  # until the process ends, however it does
      target = place / os.path.basename(name)
      with _named_errors(url, "read"):
        store, path = _store(url)
        _fetch(store, path, store.info(path).get("size"), target)
      yield str(target)
  finally:
    shutil.rmtree(place)


def remove_unlent(folder: Path) -> None:
  """Take away copies of processes that were killed."""
  for place in folder.glob(f"{_COPY_PREFIX}*"):
    with open(place / "lock", "w") as lock, contextlib.suppress(BlockingIOError):
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      shutil.rmtree(place)


@contextlib.contextmanager
def _named_errors(what: str, verb: str = "reached") -> Iterator[None]:
  try:
    yield
  except _WRONG_NAME as e:
    raise ValueError(
      f"{what} cannot be read: {paths.reason(e)}. Check its name and your credentials."
    ) from e
  except paths.errors() as e:
    raise exits.FaultError(
      f"{what} cannot be {verb}: {paths.reason(e)}. Check its name, your credentials and the "
      "network."
    ) from e


def _store(entry: str) -> tuple[fsspec.AbstractFileSystem, str]:
  protocol = entry.partition("://")[0]
  with _named_errors(entry):  # some connect at once, as ftp:// does
    try:
      return fsspec.core.url_to_fs(entry)
    except ImportError as e:
      extra = _EXTRAS.get(protocol)
      hint = f"pip install 'ats_jax[{extra}]'" if extra else str(e)
      raise ValueError(f"{entry} needs a package that is not installed: {hint}") from e
    except TypeError as e:  # its class must be told more, as that of reference://
      raise ValueError(f"{entry}: {protocol}:// needs more than an address. {_EXPECTED}") from e
    except ValueError as e:
      raise ValueError(f"{entry}: {e}. {_EXPECTED}") from e


def _listed(store: fsspec.AbstractFileSystem, place: str) -> list[tuple[str, str]]:
  """(url, name) of the files of a place, sorted; names as those of local files."""
  if glob.has_magic(place) and not place.startswith(("http://", "https://")):  # ? begins a query
    fixed = os.path.dirname(re.split(r"[*?\[]", place)[0])
    files = [str(url) for url in store.glob(place) if store.isfile(url)]
    return sorted((url, os.path.relpath(url, fixed)) for url in files)
  if _is_file(store, place):
    return [(place, os.path.basename(place.partition("?")[0]))]
  return sorted((str(url), os.path.relpath(str(url), place)) for url in store.find(place))


def _is_file(store: fsspec.AbstractFileSystem, place: str) -> bool:
  """Whether it is a file; `isfile` would hide that the store does not answer."""
  try:
    return store.info(place)["type"] == "file"
  except FileNotFoundError as e:
    # Of HTTP, fsspec makes it of whatever went wrong.
    cause = e.__cause__ if "http" in store.protocol else None
    is_missing = isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) in _MISSING
    if isinstance(cause, paths.errors()) and not is_missing:
      raise cause from None
    return False


def _copy(
  store: fsspec.AbstractFileSystem, url: str, info: dict[str, Any], name: str, root: Path
) -> str:
  key = cache.digest(store.unstrip_protocol(url), _version(info))
  target = root / f"remote-{key}" / os.path.basename(name)
  with cache.locked(root / f"remote-{key}.lock"):
    if not target.exists():
      target.parent.mkdir(exist_ok=True)
      unfinished = target.with_name("unfinished")
      logging.info("Copying %s into the data cache ...", store.unstrip_protocol(url))
      _fetch(store, url, info.get("size"), unfinished)
      unfinished.rename(target)
  return str(target)


def _version(info: dict[str, Any]) -> list[str]:
  facts = [info.get(key) for key in _VERSIONS if info.get(key)][:1]
  facts += [info.get("size"), *(info.get(key) for key in _TIMES)]
  return [str(part) for part in facts]


def _fetch(store: fsspec.AbstractFileSystem, url: str, size: int | None, target: Path) -> None:
  with store.open(url, "rb") as source, open(target, "wb") as copy:
    shutil.copyfileobj(cast(BinaryIO, source), copy, 2**20)
    copy.flush()
    os.fsync(copy.fileno())
  if size is not None and target.stat().st_size != size:
    raise OSError(f"{target.stat().st_size} of {size} bytes of {url} came: the rest was cut off")
