"""Files of records: rows with named fields, one of which is the text of a document.

A reader of a format is a function (path, fields, report) -> iterator of `Record`. `fields` names
those that are asked for, None = all. What is no record goes to `report`, which also counts them.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from ats_jax.data.text.formats import tables
from ats_jax.data.text.formats.opening import open_decompressed, suffix
from ats_jax.data.text.formats.text import Piece, one_document
from ats_jax.data.text.report import Report
from ats_jax.extensions import formats

LONGEST_LINE = 2**26  # bytes; a longer one is not read into memory

Fields = Sequence[str] | None


class Record(NamedTuple):
  """A row, and where it was: `line` counts from 1."""

  line: int
  row: dict[str, Any]


def records(path: str, fields: Fields, report: Report) -> Iterator[Record]:
  """The records of a file of a suffix in READERS, in order.

  Raises:
    ValueError: if that needs a module that is not installed, or as `Report.bad`.
    OSError: if the file cannot be read; others of `opening.errors` if it is damaged.
  """
  return READERS[suffix(path)](path, fields, report)


def json_lines(path: str, fields: Fields, report: Report) -> Iterator[Record]:
  """A JSON object a line."""
  del fields
  with open_decompressed(path) as file:
    offset = 0
    for line, (raw, size) in enumerate(_lines(file), 1):
      report.records += 1
      where, start, offset = f"{path}:{line}", offset, offset + size
      if line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
      if size > LONGEST_LINE:
        report.bad("too long", where, f"a line of {size:,} bytes: more than {LONGEST_LINE:,}")
      elif not raw.strip():
        report.skip("empty", where)
      else:
        yield from _object(raw, line, where, start, report)


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
  """Lines and their sizes; of one that is too long, only the end is there."""
  while raw := file.readline(LONGEST_LINE + 1):
    size = len(raw)
    while len(raw) > LONGEST_LINE and not raw.endswith(b"\n"):
      raw = file.readline(LONGEST_LINE + 1)
      size += len(raw)
    yield raw, size


def _object(raw: bytes, line: int, where: str, start: int, report: Report) -> Iterator[Record]:
  try:
    row = json.loads(raw.decode())
  except UnicodeDecodeError as e:
    report.bad("not UTF-8", where, f"not UTF-8 at byte {start + e.start} of the file")
    return
  except (ValueError, RecursionError) as e:
    report.bad("broken JSON", where, f"broken JSON ({e})")
    return
  if isinstance(row, dict):
    yield Record(line, row)
  else:
    report.bad("not an object", where, f"expected a JSON object, got {type(row).__name__}")


def array_record(path: str, fields: Fields, report: Report) -> Iterator[Record]:
  """A JSON object a record of an ArrayRecord file."""
  del fields
  for line, raw in enumerate(tables.array_record(path), 1):
    report.records += 1
    yield from _object(raw, line, f"{path}:{line}", 0, report)


def table(path: str, fields: Fields, report: Report) -> Iterator[Record]:
  """A row of a Parquet or Arrow file."""
  rows = tables.parquet if suffix(path) == ".parquet" else tables.arrow
  for line, row in enumerate(rows(path, fields), 1):
    report.records += 1
    if isinstance(row, UnicodeDecodeError):
      report.bad("not UTF-8", f"{path}:{line}", f"not UTF-8 at byte {row.start} of the value")
    else:
      yield Record(line, row)


# By suffix. The first name of a reader is what cached data know it by.
READERS: dict[str, Callable[[str, Fields, Report], Iterator[Record]]] = {
  ".jsonl": json_lines,
  ".ndjson": json_lines,
  ".parquet": table,
  ".arrow": table,
  ".array_record": array_record,
  ".arrayrecord": array_record,
}


@formats.register(*READERS)
def jsonl(path: str, text_field: str, report: Report) -> Iterator[Piece]:
  """One document a record, in the field `text_field`."""
  for line, row in records(path, (text_field,), report):
    where = f"{path}:{line}"
    if text_field not in row:
      has = ", ".join(map(repr, list(row)[:8])) or "nothing"
      detail = f"no field {text_field!r} (it has {has}; see data.format.text_field)"
      report.bad("missing field", where, detail)
    elif not isinstance(row[text_field], str):
      kind = type(row[text_field]).__name__
      report.bad("field not a string", where, f"field {text_field!r} is {kind}, not a string")
    else:
      yield from one_document(row[text_field], line, where, report)
