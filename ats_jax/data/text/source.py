"""Paths -> files -> documents of text or token ids, with everything that is malformed named."""

import contextlib
import functools
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ats_jax.data.corpus import cache
from ats_jax.data.text import hub_dataset, remote
from ats_jax.data.text.formats import opening, records, text, token_files
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.report import Report
from ats_jax.extensions import formats
from ats_jax.store import paths as paths_of_stores

if TYPE_CHECKING:  # imported by runs that filter
  from ats_jax.data.filters.sieve import Sieve

# A format is registered by the suffixes of its files, in small letters, as (path, text_field,
# report) -> iterator of documents: each a string, or `Piece`s. `report` takes what is malformed.
# Those of this package are in the modules of `formats`; they count their records in `report` too.
BUILT_IN = (records, text, token_files)
PREPARED = "prepared.json"  # in a folder of `ats-jax data prepare`
_OWN = ({"config.json", "run_id"}, {PREPARED})  # a run has both before it reads its text
_OWN_FOLDER = "workdir or data cache of this program"
_LONGEST_POINTER = 1024  # bytes, by the specification of Git LFS
_STREAMED = {*text.SUFFIXES.split(), *records.STREAMED}  # these may be compressed


class SourceFile(NamedTuple):
  """One input file.

  Attributes:
    path: path or URL of the file.
    name: name of the file in the names of its documents.
    kind: 'text', 'jsonl', 'tokens', or the format of an extension with the extension's hash.
    sieve: passes over the documents that filters drop; None = all are read.
  """

  path: str
  name: str
  kind: str
  sieve: "Sieve | None" = None


class MissingTextError(ValueError):
  """Text that is to be read is not there."""


def find_files(
  paths: Sequence[str],
  report: Report,
  root: Path | None = None,
  *,
  copies: bool = True,
  split: str = hub_dataset.TRAIN,
) -> list[SourceFile]:
  """The files that `DataConfig.paths` names, in a fixed order, each once.

  What is there but is no regular file (to open a pipe waits for a writer, a device may never end)
  goes to `report`, and so do pointers of Git LFS. A broken link is kept: it is unreadable when its
  documents are read. Of a folder or a glob, the workdirs of runs and the data cache are passed
  over, and so is what `hub_dataset.choose` says.

  Args:
    paths: files, folders and globs, local or on a store; empty = the standard library's sources.
    report: takes what is passed over.
    root: of the cache, for copies of what is on a store; None = the usual one.
    copies: make them; else what is on a store has its address as its path.
    split: the split to read of a dataset, "train" or "validation".

  Raises:
    ValueError: for a path that does not exist or a glob without a match (a `MissingTextError`), a
      file whose suffix says nothing, no file at all, or a dataset that does not say what it would
      train on.
  """
  if not paths:
    return _standard_library(report)
  by_real_path: dict[str, SourceFile] = {}
  for entry in paths:
    if entry.startswith(hub_dataset.NAMED):
      from ats_jax.data.text import named_dataset

      expanded = named_dataset.files(entry, split)
    elif paths_of_stores.is_remote(entry):
      expanded = _expand_remote(entry, report, copies, root or cache.cache_root(""), split)
    else:
      expanded = _expand(os.path.expanduser(entry), report, root, split)
    for path, name in expanded:
      is_url = paths_of_stores.is_remote(path)
      real = path if is_url else os.path.realpath(path)
      if os.path.exists(real) and not os.path.isfile(real):
        report.bad("not a regular file", path, "not a regular file but a pipe, socket or device")
      elif real in by_real_path:
        report.skip("listed twice", path)
      elif pointer := "" if is_url else _lfs_pointer(real):
        report.bad("pointer of Git LFS", path, pointer)
      else:
        by_real_path[real] = SourceFile(
          path if is_url else os.path.abspath(path), name, _kind(name)
        )
  if not by_real_path:
    left_out = f" ({report})" if report.malformed or report.skipped else ""
    raise ValueError(
      f"paths={','.join(paths)!r} holds no file that can be read{left_out}. "
      f"Known suffixes: {' '.join(sorted(formats))}."
    )
  return list(by_real_path.values())


def _standard_library(report: Report) -> list[SourceFile]:
  root = sysconfig.get_paths()["stdlib"]
  files = (
    SourceFile(path, name, "text")
    for path, name in _walk(root, report)
    if name.endswith(".py") and not {"site-packages", "dist-packages"}.intersection(name.split("/"))
  )
  return list(files)


def _lfs_pointer(path: str) -> str:
  with contextlib.suppress(OSError):  # reported when its documents are read
    if os.path.getsize(path) < _LONGEST_POINTER:
      with open(path, "rb") as file:
        return paths_of_stores.lfs_pointer(file.read(64))
  return ""


def _expand(
  entry: str, report: Report, cache_root: Path | None, split: str
) -> Iterator[tuple[str, str]]:
  """(path, name) of the files under one entry.

  A name is relative to the entry's folder, so the split survives a move of the data.
  """
  if os.path.isdir(entry):
    found = list(_walk(entry, report, cache_root))
    card = os.path.join(entry, hub_dataset.CARD)
    yield from _of_split(
      entry, found, card if os.path.isfile(card) else None, report, split, is_folder=True
    )
  elif os.path.exists(entry) or os.path.islink(entry):
    _named(entry)
    yield entry, Path(entry).name
  elif glob.has_magic(entry):
    matches = sorted(glob.glob(entry, recursive=True))
    matches = [path for path in matches if not os.path.isdir(path)]
    if not matches:
      raise MissingTextError(
        f"paths: the glob {entry!r} matches no file (seen from {os.getcwd()!r})."
      )
    fixed = os.path.dirname(re.split(r"[*?\[]", entry)[0])
    found = []
    is_own = functools.cache(lambda folder: _is_own(folder, os.listdir(folder), cache_root))
    for path in matches:
      name = Path(os.path.relpath(path, fixed or ".")).as_posix()
      if any(is_own(os.path.join(fixed, folder)) for folder in Path(name).parents[:-1]):
        report.skip(_OWN_FOLDER, path)
      else:
        found.append((path, name))
    yield from _of_split(entry, found, None, report, split, is_folder=False)
  else:
    named = " Sources with names are given in data.sources." if "=" in entry else ""
    raise MissingTextError(f"paths: {entry!r} does not exist (seen from {os.getcwd()!r}).{named}")


def _expand_remote(
  entry: str, report: Report, copies: bool, root: Path, split: str
) -> Iterator[tuple[str, str]]:
  files = remote.listed(entry)
  if len(files) == 1:
    _named(files[0].name)
    chosen = [(files[0].name, files[0].name)]
  else:
    card = next((file for file in files if file.name == hub_dataset.CARD), None)
    found = [(file.name, file.name) for file in files]
    copy = remote.copied(card, root) if card else None
    chosen = _of_split(entry, found, copy, report, split, is_folder=not glob.has_magic(entry))
  by_name = {file.name: file for file in files}
  for name, _ in chosen:
    file = by_name[name]
    yield remote.copied(file, root) if copies else remote.url_of(file), name


def _of_split(
  entry: str,
  found: list[tuple[str, str]],
  card: str | None,
  report: Report,
  split: str,
  *,
  is_folder: bool,
) -> list[tuple[str, str]]:
  """Those of the files of an entry that are read: of a known format, and of the split."""
  known = [(path, name) for path, name in found if _is_known(path, name, report)]
  others = hub_dataset.choose(entry, [name for _, name in known], card, split, is_folder=is_folder)
  for path, name in known:
    if name in others:
      report.skip(others[name], path)
  return [(path, name) for path, name in known if name not in others]


def _has_reader(path: str) -> bool:
  suffix = opening.suffix(path)
  return suffix in formats and (suffix in _STREAMED or not opening.is_compressed(path))


def _is_known(path: str, name: str, report: Report) -> bool:
  if opening.suffix(name) == ".json" and os.path.basename(name) in hub_dataset.METADATA:
    report.skip("metadata of a dataset", path)
    return False
  known = _has_reader(name)
  if not known:
    report.skip("unknown suffix", path)
  return known


def _named(path: str) -> None:
  """Refuse a file that was named itself and that nothing reads."""
  suffix = opening.suffix(path)
  if _has_reader(path):
    return
  if suffix in formats:
    raise ValueError(
      f"paths: {path!r} is compressed, which only text, JSON and CSV may be: {suffix} files are "
      "read from anywhere in them. Decompress it."
    )
  raise ValueError(
    f"paths: {path!r} has a suffix that says nothing about its format. "
    f"Known suffixes: {' '.join(sorted(formats))}, and {' '.join(opening.OPENERS)} behind those of "
    "text, JSON and CSV."
  )


def _kind(path: str) -> str:
  """What a file holds; another version of an extension makes another corpus of the same files."""
  suffix = opening.suffix(path)
  owner = formats.owner(suffix)
  return f"{suffix} of {owner}" if owner else formats.find(suffix).__name__


def _is_own(folder: str, files: Sequence[str], cache_root: Path | None) -> bool:
  """Whether this program wrote what is in a folder: a workdir, prepared data, the data cache."""
  is_cache = cache_root and os.path.realpath(folder) == os.path.realpath(cache_root)
  return bool(is_cache) or any(names.issubset(files) for names in _OWN)


def _walk(root: str, report: Report, cache_root: Path | None = None) -> Iterator[tuple[str, str]]:
  def unreadable(e: OSError) -> None:
    report.bad("unreadable", str(e.filename), f"the folder cannot be listed ({e.strerror})")

  seen = set()
  for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
    real = os.path.realpath(folder)
    is_own = _is_own(folder, files, cache_root)
    if is_own:
      report.skip(_OWN_FOLDER, folder)
    if is_own or real in seen:  # a link back up
      folders.clear()
      continue
    seen.add(real)
    folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
    kept, left_out = hub_dataset.saved(folder, sorted(files))
    for file in left_out:
      report.skip("not part of the dataset", os.path.join(folder, file))
    for file in (f for f in kept if not f.startswith(".")):
      path = os.path.join(folder, file)
      yield path, Path(os.path.relpath(path, root)).as_posix()


def content_fingerprint(files: list[SourceFile], root: Path) -> str:
  """A hash of the names and contents of `files`.

  Contents are read only if a (path, size, mtime) differs from what the memo in `root` was made of.
  """
  stats: list[list] = []
  for file in files:
    with contextlib.suppress(OSError):  # reported when its documents are read
      stat = os.stat(file.path)
      stats.append([*file[:3], stat.st_size, stat.st_mtime_ns])
  memo = root / f"memo-{cache.digest(stats)}"
  with contextlib.suppress(FileNotFoundError):
    remembered = memo.read_text()
    if re.fullmatch("[0-9a-f]{32}", remembered):
      return remembered
  contents = []
  for file in files:
    try:
      with open(file.path, "rb") as f:
        contents.append([file.name, file.kind, hashlib.file_digest(f, "sha256").hexdigest()])
    except OSError as e:
      contents.append([file.name, file.kind, f"unreadable {e.errno}"])
  fingerprint = cache.digest(contents)
  if not any(content[2].startswith("unreadable") for content in contents):
    cache.write_atomically(memo, fingerprint)
  return fingerprint


def read_pieces(file: SourceFile, text_field: str, report: Report) -> Iterator[Piece]:
  """Read the documents of a file of text, in pieces of bounded length.

  What is malformed goes to `report`, which counts the documents too.
  """
  suffix = opening.suffix(file.name)  # its path may be what a link leads to
  read = formats.find(suffix)
  foreign = formats.owner(suffix)
  raw_pieces = (_read_extension if foreign else _read_builtin)(read, file, text_field, report)
  if file.sieve:
    raw_pieces = file.sieve.passed(file.path, raw_pieces, report)
  try:
    for piece in raw_pieces:
      report.documents += piece.starts
      yield piece
  except opening.errors() as e:
    report.lost("unreadable", file.path, f"cannot be read ({opening.reason(e)})")


def _read_builtin(
  read: Callable, file: SourceFile, text_field: str, report: Report
) -> Iterator[Piece]:
  return read(file.path, text_field, report)


def _read_extension(
  read: Callable, file: SourceFile, text_field: str, report: Report
) -> Iterator[Piece]:
  """The documents of an extension's format, which yields texts and counts nothing."""
  dropped, documents = report.dropped, 0
  try:
    for number, document in enumerate(read(file.path, text_field, report), 1):
      if isinstance(document, Piece):
        documents += document.starts
        yield document
      else:
        for piece in text.one_document(document, number, f"{file.path}:{number}", report):
          documents += piece.starts
          yield piece
  finally:
    report.records += documents + report.dropped - dropped


def document_name(file: SourceFile, line: int, part: int = 0) -> str:
  """What a document is called in the split, in reports and in the audit."""
  place = {"text": "", "jsonl": f":{line}", "tokens": f"#{line}"}
  name = file.name + place.get(file.kind, f":{line}")  # an extension's: the place in its file
  return f"{name}[{part}]" if part else name


def name_hash(name: str) -> int:
  """64 bits of BLAKE2b."""
  raw = name.encode(errors="surrogateescape")  # a file's name may be any bytes
  return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest())
