"""The cache on disk: folders of arrays, written once, renamed into place, checked on opening."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

FORMAT = 2  # part of every entry's name: raise it when the meaning of a cached file changes
_HASH = 1  # of `digest`, which runs keep: the order of rows and what a resume compares follow it
_MANIFEST = "manifest.json"


def cache_root(cache_dir: str) -> Path:
  """The folder of the cache, created if it is not there; "" = $XDG_CACHE_HOME or ~/.cache."""
  home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
  root = Path(cache_dir).expanduser() if cache_dir else home / "ats_jax" / "data"
  try:
    root.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ValueError(
      f"The data cache {str(root)!r} cannot be created ({e.strerror}). "
      "Set XDG_CACHE_HOME or data.cache_dir to a folder that can be written."
    ) from e
  return root.resolve()


def digest(*parts: Any) -> str:
  """32 hex digits that name `parts` (anything JSON can hold)."""
  text = json.dumps([_HASH, *parts], sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Folder:
  """One finished entry of the cache. Pickles as its path, so a loader process maps it anew."""

  def __init__(self, path: Path):
    self.path = path
    self.meta: dict[str, Any] = _read_manifest(path)["meta"]

  def array(self, name: str) -> np.ndarray:
    """The array saved as `name`.npy, memory-mapped, read-only."""
    mapped = np.load(self.path / f"{name}.npy", mmap_mode="r")
    return mapped.view(np.ndarray)  # indexing a np.memmap itself is ten times slower

  def __reduce__(self):
    return Folder, (self.path,)


def cached(
  root: Path, name: str, build: Callable[[Path], dict[str, Any]], *, goes_on: bool = False
) -> Folder:
  """The folder `root/name`, built first if it is missing or damaged.

  Args:
    root: an existing folder.
    name: the key; must name the content completely.
    build: writes its files into the folder it is given and returns a dict for `Folder.meta`.
    goes_on: `build` gets what a process that was killed has left there.

  Raises:
    ValueError: if the file system of `root` has no file locks.
  """
  if folder := finished(root, name):
    return folder
  name = f"{name}-{FORMAT}"
  final = root / name
  with locked(root / f"{name}.lock"):
    defect = damage(final)  # again: another process may have built it while this one waited
    if defect and final.exists():
      logging.warning("The cache entry %s is damaged (%s); building it again.", final, defect)
      shutil.rmtree(final)
    if defect:
      unfinished = root / f"{name}.tmp"
      if not goes_on:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
      unfinished.mkdir(exist_ok=True)
      _write_manifest(unfinished, build(unfinished))
      unfinished.rename(final)
  return Folder(final)


def finished(root: Path, name: str) -> Folder | None:
  """The folder `root/name`, if `cached` would not build it."""
  folder = root / f"{name}-{FORMAT}"
  return None if damage(folder) else Folder(folder)


def _write_manifest(folder: Path, meta: dict[str, Any]) -> None:
  files = {}
  for path in sorted(folder.iterdir()):
    with open(path, "rb") as f:
      sha256 = hashlib.file_digest(f, "sha256").hexdigest()
      os.fsync(f.fileno())
    files[path.name] = [*_size_and_time(path), sha256]
  body = json.dumps({"files": files, "meta": meta})
  with open(folder / _MANIFEST, "w") as f:
    f.write(f"{digest(body)}\n{body}")
    f.flush()
    os.fsync(f.fileno())


def _read_manifest(folder: Path) -> dict[str, Any]:
  check, body = (folder / _MANIFEST).read_text().split("\n")
  if check != digest(body):
    raise ValueError("its hash is another")
  return json.loads(body)


def damage(folder: Path) -> str:
  """What is wrong with `folder`; "" if nothing. A file is hashed only if its time has changed."""
  try:
    for name, (size, time, sha256) in _read_manifest(folder)["files"].items():
      path = folder / name
      if _size_and_time(path) == [size, time]:
        continue
      with open(path, "rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != sha256:
          return f"{name} is not what was written"
  except FileNotFoundError as e:
    return f"{Path(e.filename).name} is missing"
  except ValueError as e:
    return f"{_MANIFEST} is not what was written: {e}"
  return ""


def hashes(folder: Path, pattern: str) -> dict[str, str]:
  """The SHA-256 of the files of an entry whose names match, as they were written."""
  files = _read_manifest(folder)["files"]
  return {name: sha256 for name, (*_, sha256) in files.items() if fnmatch(name, pattern)}


def _size_and_time(path: Path) -> list[int]:
  stat = path.stat()
  return [stat.st_size, stat.st_mtime_ns]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Holds an advisory lock, which the kernel drops if the process dies."""
  with open(path, "w") as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX)
    except OSError as e:
      raise ValueError(
        f"The file system of {str(path.parent)!r} has no file locks ({e.strerror}). "
        "Set data.cache_dir to a folder on a local disk."
      ) from e
    yield


def write_atomically(path: Path, text: str) -> None:
  """Writes a small text file so that a reader sees all of it or none."""
  unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  unfinished.write_text(text, encoding="utf-8", errors="surrogateescape")
  unfinished.replace(path)
