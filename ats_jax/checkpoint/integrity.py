"""The manifest of a checkpoint: size and SHA-256 of every file in it."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, cast

from ats_jax.config.identity import RunIdentity
from ats_jax.store import paths
from ats_jax.store.paths import Path

MANIFEST = "manifest.json"
VERSION = 4
# SHA-256 has instructions of its own on current CPUs: the fastest hash of the standard library.
HASH = "sha256"
# Of a file that is hashed, bytes at a time: with few pieces, threads seldom wait for Python's lock.
PIECE = 2**22
# What `checking` has begun, by folder: the entries of the manifest, and what is wrong with each.
_begun: dict[str, tuple[dict[str, Any], list[concurrent.futures.Future[str]]]] = {}


class CheckpointError(ValueError):
  """A checkpoint could not be written, or none that can be trusted was found."""


class DeletedError(CheckpointError):
  """A checkpoint was deleted while it was read: a training beside this process keeps newer ones."""


class _DamagedManifestError(CheckpointError):
  """The manifest is not what was written."""


def seal(folder: Path, fields: dict[str, Any]) -> None:
  """Write the manifest of a finished checkpoint.

  Args:
    folder: a local one that holds the files; nobody writes to it any more.
    fields: JSON values to keep in the manifest (step, run, metric, leaves).
  """
  text = manifest(fields, digests(folder, paths.files(folder)))
  (folder / MANIFEST).write_text(text, encoding="utf-8")


def digests(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Size and hash of files, as a manifest has them."""
  names = list(names)
  hashes = paths.in_threads(lambda name: _digest(folder / name), names)
  return {
    name: {"bytes": size, HASH: digest} for name, (size, digest) in zip(names, hashes, strict=True)
  }


def manifest(fields: dict[str, Any], files: dict[str, dict[str, Any]]) -> str:
  """The text of a manifest; see `seal` and `digests`."""
  return _render({"version": VERSION, **fields, "files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
  """Return the manifest of a checkpoint: version, step, run, metric, leaves, files.

  Raises:
    CheckpointError: if it is missing, unreadable, altered, of another format, or if the folder was
      given the name of another step.
  """
  try:
    text = paths.read(folder / MANIFEST).decode("utf-8")
    body = paths.parse_json(text)["body"]
  except FileNotFoundError:
    raise _DamagedManifestError(f"{MANIFEST} is missing") from None
  except (OSError, ValueError, TypeError, KeyError) as e:
    raise _DamagedManifestError(f"{MANIFEST} cannot be read ({type(e).__name__}: {e})") from e
  if _render(body) != text:
    raise _DamagedManifestError(f"{MANIFEST} has changed: it does not match its own checksum")
  version = body.get("version") if isinstance(body, dict) else None
  if isinstance(version, int) and version != VERSION:
    raise CheckpointError(
      f"{folder} has format version {version}, this program reads {VERSION}. "
      "Use the version of ats_jax that wrote it."
    )
  if problem := _problem(body):
    raise _DamagedManifestError(f"{MANIFEST} {problem}")
  if str(body["step"]) != folder.name:
    raise _DamagedManifestError(f"{MANIFEST} says step {body['step']}")
  return body


def _problem(body: Any) -> str:
  """What is wrong with the content of a manifest, whose checksum anybody can make; "" = nothing."""
  fields = {
    "version": int, "step": int, "run": dict | None, "metric": float | int | None, "leaves": dict,
    "files": dict,
  }  # fmt: skip
  if not isinstance(body, dict):
    return "holds no object"
  for name, kind in fields.items():
    if name not in body or not isinstance(body[name], kind):
      return f"has no {name}, or one of another type"
  if not all(isinstance(text, str) for text in body["leaves"].values()):
    return "has leaves that are no texts"
  for name, entry in body["files"].items():
    if name.startswith("/") or ".." in name.split("/"):
      return f"names {name!r}, which is outside of the folder"
    sizes = isinstance(entry, dict) and (entry.get("bytes"), entry.get(HASH))
    if not (sizes and isinstance(sizes[0], int) and isinstance(sizes[1], str)):
      return f"has no size and {HASH} of {name}"
  return ""


def find_damage(folder: Path, only: Iterable[str] | None = None) -> list[str]:
  """Compare the files of a checkpoint with its manifest.

  Args:
    folder: a committed checkpoint.
    only: names of the files to look at; None = all.

  Returns:
    What is wrong, a phrase for each file; empty if nothing is. Files that the manifest does not
    know are harmless: nothing reads them.

  Raises:
    CheckpointError: if the checkpoint is intact but of a later format.
  """
  try:
    files = read_manifest(folder)["files"]
  except _DamagedManifestError as e:
    return [str(e)]
  begun, found = _begun.pop(os.fspath(folder), ({}, [])) if only is None else ({}, [])
  if found and begun == files:
    return [problem for future in found if (problem := future.result())]
  names = list(files) if only is None else list(only)
  return [p for p in paths.in_threads(lambda n: _compare(folder / n, n, files[n]), names) if p]


@contextlib.contextmanager
def checking(folder: Path) -> Iterator[None]:
  """Hash the files of a checkpoint in threads during the block, for its first `find_damage`.

  Args:
    folder: a committed checkpoint.

  Raises:
    CheckpointError: as `read_manifest`.
  """
  files = read_manifest(folder)["files"]
  with paths.thread_pool() as pool:
    found = [pool.submit(_compare, folder / name, name, entry) for name, entry in files.items()]
    _begun[os.fspath(folder)] = files, found
    try:
      yield
    finally:
      _begun.pop(os.fspath(folder), None)
      pool.shutdown(cancel_futures=True)


def check_run(folder: Path, expected: RunIdentity | None) -> None:
  """Check that a checkpoint is one of this run; damage is for `find_damage` to tell.

  Args:
    folder: a committed checkpoint.
    expected: the run; None = any.

  Raises:
    CheckpointError: if it is intact and of another run.
  """
  if expected is None:
    return
  try:
    saved = read_manifest(folder)["run"]
  except _DamagedManifestError:
    return
  wanted = dataclasses.asdict(expected)
  if saved and expected.has(saved):
    return
  saved = dict.fromkeys(wanted, "none") | (saved or {})
  if saved["run"] != wanted["run"]:
    which = f"is of another run: {saved['run']}, expected {wanted['run']}"
  else:
    which = (
      f"is of this run ({wanted['run']}) with other settings: their hash is {saved['settings']}, "
      f"expected {wanted['settings']}"
    )
  raise CheckpointError(
    f"checkpoint {folder} {which}. Nothing was restored and nothing was changed. Move it out of "
    "this folder, or use the workdir that it comes from, or another one."
  )


def _compare(path: Path, name: str, expected: dict[str, Any]) -> str:
  try:
    size, digest = _digest(path)
  except FileNotFoundError:
    return f"{name} is missing"
  except (OSError, ValueError) as e:
    return f"{name} cannot be read ({e})"
  if size != expected["bytes"]:
    return f"{name} has {size} bytes instead of {expected['bytes']}"
  if digest != expected[HASH]:
    return f"{name} has changed: {HASH} {digest[:12]} instead of {expected[HASH][:12]}"
  return ""


def _digest(path: Path) -> tuple[int, str]:
  """Bytes and hash of a file, read piece by piece."""
  with paths.open_to_read(path) as f:
    digest, size = hashlib.new(HASH), f.seek(0, os.SEEK_END)
    f.seek(0)
    piece = memoryview(bytearray(min(size, PIECE) or 1))
    while number := cast(io.RawIOBase, f).readinto(piece):
      digest.update(piece[:number])
    return size, digest.hexdigest()


def _render(body: Any) -> str:
  # The checksum protects the body; comparing whole texts protects the rest of the file too.
  text = json.dumps(body, sort_keys=True, indent=1)
  checksum = hashlib.sha256(text.encode()).hexdigest()
  return f'{{"checksum": "{checksum}", "body":\n{text}\n}}\n'
