"""Paths -> files -> documents of text or token ids, with everything that is malformed named."""

import codecs
import contextlib
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from ats_jax.data import cache
from ats_jax.extensions import formats

_TEXT = """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .yaml .yml .toml .ini .cfg
  .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .js .ts .go .rs .rb .php .swift .scala .hs .ml .jl
  .r .lua .pl .sh .sql .css .srt"""
_PIECE = 2**18  # characters encoded at a time; a longer document is cut where it cannot matter
# Between words, where the usual splitting patterns (of GPT-2, GPT-4, Llama 3) never join: before a
# single space, after a single line break. The ids of the parts are those of the whole.
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_SHOWN = 5  # problems repeated in the log


class SourceFile(NamedTuple):
  """One input file.

  Attributes:
    path: where it is.
    name: its name in document names.
    kind: 'text', 'jsonl', 'tokens', or the format of an extension with the extension's hash.
  """

  path: str
  name: str
  kind: str


class Piece(NamedTuple):
  """A part of a document of text. `line` is 0 in a text file and counts from 1 in a JSONL file."""

  line: int
  starts: bool
  text: str


class Report:
  """Counts what was malformed or left out; names each in a file if it is given one.

  Attributes:
    malformed: kind -> count of lines and files that could not be used.
    skipped: kind -> count of what is harmless to leave out (empty, unknown suffix, listed twice).
    first: the first few, in words.
  """

  def __init__(self, *, strict: bool, file: TextIO | None = None):
    self.malformed: Counter[str] = Counter()
    self.skipped: Counter[str] = Counter()
    self.first: list[str] = []
    self._strict, self._file = strict, file

  def bad(self, kind: str, where: str, detail: str) -> None:
    """Records something malformed, or raises ValueError if `strict`."""
    if self._strict:
      raise ValueError(
        f"{where}: {detail}. Mend it, or set data.strict=False to count it and leave it out."
      )
    self.malformed[kind] += 1
    if len(self.first) < _SHOWN:
      self.first.append(f"{where}: {detail}")
    self._write(f"{where}: {detail}")

  def skip(self, kind: str, where: str) -> None:
    """Records something that holds no document."""
    self.skipped[kind] += 1
    self._write(f"{where}: {kind}")

  def summary(self) -> dict[str, Any]:
    """The counts and the first few as plain types."""
    counts = {"malformed": dict(self.malformed), "skipped": dict(self.skipped)}
    return {**counts, "first": self.first}

  def __str__(self) -> str:
    counts = {**self.malformed, **self.skipped}
    text = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing malformed"
    return "; ".join([text, *self.first])

  def _write(self, line: str) -> None:
    if self._file:
      self._file.write(line.replace("\n", "\\n") + "\n")


def find_files(paths: str, report: Report) -> list[SourceFile]:
  """The files that `DataConfig.paths` names, in a fixed order, each once.

  What is there but is no regular file (to open a pipe waits for a writer, a device may never end)
  goes to `report`. A broken link is kept: it is unreadable when its documents are read.

  Raises:
    ValueError: for a path that does not exist, a glob without a match, a file whose suffix says
      nothing, or no file at all.
  """
  if not paths.strip():
    return _standard_library(report)
  found: dict[str, SourceFile] = {}
  for entry in (part.strip() for part in paths.split(",")):
    if not entry:
      continue
    for path, name in _expand(os.path.expanduser(entry), report):
      real = os.path.realpath(path)
      if os.path.exists(real) and not os.path.isfile(real):
        report.bad("not a regular file", path, "not a regular file but a pipe, socket or device")
      elif real in found:
        report.skip("listed twice", path)
      else:
        found[real] = SourceFile(real, name, _kind(path))
  if not found:
    left_out = f" ({report})" if report.malformed or report.skipped else ""
    raise ValueError(
      f"paths={paths!r} holds no file that can be read{left_out}. "
      f"Known suffixes: {' '.join(sorted(formats))}."
    )
  return list(found.values())


def _standard_library(report: Report) -> list[SourceFile]:
  root = sysconfig.get_paths()["stdlib"]
  files = (
    SourceFile(path, name, "text")
    for path, name in _walk(root, report)
    if name.endswith(".py") and not {"site-packages", "dist-packages"}.intersection(name.split("/"))
  )
  return list(files)


def _expand(entry: str, report: Report) -> Iterator[tuple[str, str]]:
  """(path, name) of the files under one entry.

  A name is relative to the entry's folder, so the split survives a move of the data.
  """
  if os.path.isdir(entry):
    for path, name in _walk(entry, report):
      if _suffix(path) in formats:
        yield path, name
      else:
        report.skip("unknown suffix", path)
  elif os.path.exists(entry) or os.path.islink(entry):
    if _suffix(entry) not in formats:
      raise ValueError(
        f"paths: {entry!r} has a suffix that says nothing about its format. "
        f"Known suffixes: {' '.join(sorted(formats))}."
      )
    yield entry, Path(entry).name
  elif glob.has_magic(entry):
    matches = sorted(glob.glob(entry, recursive=True))
    matches = [path for path in matches if not os.path.isdir(path)]
    if not matches:
      raise ValueError(f"paths: the glob {entry!r} matches no file.")
    fixed = os.path.dirname(re.split(r"[*?\[]", entry)[0])
    for path in matches:
      if _suffix(path) in formats:
        yield path, Path(os.path.relpath(path, fixed or ".")).as_posix()
      else:
        report.skip("unknown suffix", path)
  else:
    raise ValueError(f"paths: {entry!r} does not exist (seen from {os.getcwd()!r}).")


def _suffix(path: str) -> str:
  return Path(path).suffix.lower()


def _kind(path: str) -> str:
  """What a file holds; another version of an extension makes another corpus of the same files."""
  suffix = _suffix(path)
  owner = formats.owner(suffix)
  return f"{suffix} of {owner}" if owner else formats.find(suffix).__name__


def _walk(root: str, report: Report) -> Iterator[tuple[str, str]]:
  def unreadable(e: OSError) -> None:
    report.bad("unreadable", str(e.filename), f"the folder cannot be listed ({e.strerror})")

  seen = set()
  for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
    if os.path.realpath(folder) in seen:  # a link back up
      folders.clear()
      continue
    seen.add(os.path.realpath(folder))
    folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
    for file in sorted(f for f in files if not f.startswith(".")):
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
      stats.append([*file, stat.st_size, stat.st_mtime_ns])
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


def pieces(file: SourceFile, text_field: str, report: Report) -> Iterator[Piece]:
  """The documents of a file of text, in pieces of bounded length.

  What is malformed goes to `report`.
  """
  try:
    read = formats.find(_suffix(file.name))  # its path may be what a link leads to
    found = read(file.path, text_field, report)
    for number, document in enumerate(found, 1):
      if isinstance(document, Piece):
        yield document
      else:
        yield from _whole(document, number, file.path, report)
  except OSError as e:
    report.bad("unreadable", file.path, f"cannot be read ({e.strerror})")


def _whole(document: str, number: int, path: str, report: Report) -> Iterator[Piece]:
  """A document of an extension's format."""
  where = f"{path}:{number}"
  if document:
    yield from _json_text(document, number, where, report)
  else:
    report.skip("empty", where)


# A format is registered by the suffixes of its files, in small letters, as (path, text_field,
# report) -> iterator of documents: each a string, or `Piece`s. `report` takes what is malformed.


@formats.register(*_TEXT.split())
def text(path: str, text_field: str, report: Report) -> Iterator[Piece]:
  """One document a file, in UTF-8."""
  del text_field
  try:  # the whole file first: half a document is no document
    num_chars = sum(map(len, _decoded(path)))
  except UnicodeDecodeError as e:
    report.bad("not UTF-8", path, f"not UTF-8 at byte {e.start} ({e.object[:1].hex()})")
    return
  if not num_chars:
    report.skip("empty", path)
    return
  yield from _cut(_decoded(path), 0)


@formats.register(".bin", ".npy")
def tokens(path: str, text_field: str, report: Report) -> Iterator[Piece]:
  """Ids, which `token_documents` reads: there is no text."""
  del path, text_field, report
  yield from ()


def _decoded(path: str) -> Iterator[str]:
  """Blocks of the text. Raises UnicodeDecodeError with `start` counted in the file."""
  decoder = codecs.getincrementaldecoder("utf-8")()
  offset = 0
  with open(path, "rb") as f:
    while True:
      block = f.read(_PIECE)
      pending = len(decoder.getstate()[0])
      try:
        text = decoder.decode(block, final=not block)
      except UnicodeDecodeError as e:
        e.object, e.start = e.object[e.start :], offset - pending + e.start
        raise
      yield text
      if not block:
        return
      offset += len(block)


@formats.register(".jsonl")
def jsonl(path: str, text_field: str, report: Report) -> Iterator[Piece]:
  """One document a line, in the field `text_field` of a JSON object."""
  with open(path, "rb") as lines:
    yield from _jsonl(lines, path, text_field, report)


def _jsonl(lines: Iterable[bytes], path: str, text_field: str, report: Report) -> Iterator[Piece]:
  for row, line in json_rows(lines, path, report):
    where = f"{path}:{line}"
    if text_field not in row:
      has = ", ".join(map(repr, list(row)[:8])) or "nothing"
      report.bad(
        "missing field", where, f"no field {text_field!r} (it has {has}; see data.text_field)"
      )
    elif not isinstance(row[text_field], str):
      kind = type(row[text_field]).__name__
      report.bad("field not a string", where, f"field {text_field!r} is {kind}, not a string")
    elif not row[text_field]:
      report.skip("empty", where)
    else:
      yield from _json_text(row[text_field], line, where, report)


def json_rows(
  lines: Iterable[bytes], path: str, report: Report
) -> Iterator[tuple[dict[str, Any], int]]:
  """The objects of a JSONL file, each with its line; what is none goes to `report`."""
  offset = 0
  for line, raw in enumerate(lines, 1):
    where, start, offset = f"{path}:{line}", offset, offset + len(raw)
    if line == 1:
      raw = raw.removeprefix(codecs.BOM_UTF8)
    if not raw.strip():
      report.skip("empty", where)
      continue
    try:
      row = json.loads(raw.decode())
    except UnicodeDecodeError as e:
      report.bad("not UTF-8", where, f"not UTF-8 at byte {start + e.start} of the file")
      continue
    except (ValueError, RecursionError) as e:
      report.bad("broken JSON", where, f"broken JSON ({e})")
      continue
    if isinstance(row, dict):
      yield row, line
    else:
      report.bad("not an object", where, f"expected a JSON object, got {type(row).__name__}")


def _json_text(text: str, line: int, where: str, report: Report) -> Iterator[Piece]:
  try:
    text.encode()
  except UnicodeEncodeError as e:
    report.bad("lone surrogate", where, f"a lone surrogate at character {e.start} of the text")
    return
  yield from _cut((text[i : i + _PIECE] for i in range(0, len(text), _PIECE)), line)


def _cut(blocks: Iterable[str], line: int) -> Iterator[Piece]:
  rest, starts = "", True
  for block in blocks:
    rest += block
    while len(rest) > _PIECE and (cut := _CUT.search(rest, _PIECE)):
      yield Piece(line, starts, rest[: cut.start()])
      rest, starts = rest[cut.start() :], False
    if len(rest) > 8 * _PIECE:  # one word of two million characters: cut anywhere
      yield Piece(line, starts, rest)
      rest, starts = "", False
  if rest:
    yield Piece(line, starts, rest)


def token_array(path: str, vocab_size: int) -> np.ndarray:
  """The ids of a .bin or .npy file as a 1-D memory-mapped array.

  Raises:
    ValueError: if the file does not hold a 1-D array of integers.
  """
  try:
    if _suffix(path) == ".npy":
      array = np.lib.format.open_memmap(path, "r")
      if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
          f"expected a 1-D array of integers, got {array.dtype} of shape {array.shape}."
        )
      return array.view(np.ndarray)
    dtype = token_dtype(vocab_size)
    size = os.path.getsize(path)
    if size % dtype.itemsize:
      raise ValueError(
        f"{size} bytes is no whole number of {dtype} ids "
        f"(the dtype follows from the tokenizer's {vocab_size} ids)."
      )
    return np.memmap(path, dtype, "r").view(np.ndarray) if size else np.empty(0, dtype)
  except OSError as e:
    raise ValueError(f"{path}: cannot be read ({e.strerror}).") from e
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from e


def token_dtype(vocab_size: int) -> np.dtype:
  """uint16 if every id fits, else uint32."""
  return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def token_documents(
  path: str, *, vocab_size: int, bos_id: int, eos_id: int, report: Report, chunk: int = 2**24
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Where the documents of a token file are.

  A document ends before each eos (and at the end of the file); a bos before it is not part of it.

  Returns:
    line: each document's number in the file from 1, counting empty ones.
    start: of its first token.
    length: its tokens, eos not counted. All int64; documents without a token are left out.

  Raises:
    ValueError: if an id is outside the vocabulary, with the file, the position and the id.
  """
  ids = token_array(path, vocab_size)
  ends = []
  for at in range(0, len(ids), chunk):
    part = ids[at : at + chunk]
    outside = (part >= vocab_size) | (part < 0)
    if outside.any():
      first = int(outside.argmax())
      raise ValueError(
        f"{path}: id {int(part[first])} at position {at + first} is outside the vocabulary "
        f"[0, {vocab_size}). Set data.tokenizer to the one the file was made with."
      )
    ends.append(np.flatnonzero(part == eos_id) + at)
  if not len(ids):
    report.skip("empty", path)
  if len(ids) and ids[-1] != eos_id:
    ends.append(np.array([len(ids)]))
  end = np.concatenate(ends) if ends else np.empty(0, np.int64)
  start = np.concatenate([[0], end[:-1] + 1])[: len(end)]
  if bos_id != eos_id and len(ids):
    start += (ids[np.minimum(start, len(ids) - 1)] == bos_id) & (start < end)
  line = np.arange(1, len(end) + 1)
  full = start < end
  for number in line[~full]:
    report.skip("empty", f"{path}#{number}")
  return line[full], start[full].astype(np.int64), (end - start)[full].astype(np.int64)
