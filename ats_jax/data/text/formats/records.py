"""Files of records: rows with named fields, one of which is the text of a document.

A reader of a format is a function (path, fields, report) -> iterator of `Record`. `fields` names
those that are asked for; one that can do so reads nothing else, and gives null for the others. What
is no record goes to `report`, which also counts them.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from ats_jax.data.text.formats import tables
from ats_jax.data.text.formats.opening import open_decompressed, reason, suffix
from ats_jax.data.text.formats.text import Piece, one_document
from ats_jax.data.text.report import Report
from ats_jax.extensions import formats
from ats_jax.store import paths

LONGEST_LINE = 2**26  # bytes; a longer one is not read into memory
_BLOCK = 2**20  # characters read at a time
_BLANK = re.compile(r"[ \t\r\n\ufeff]*")  # between values of JSON, with marks of files joined on
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, in text that keeps them
_DECODER = json.JSONDecoder()


class Record(NamedTuple):
  """A row, and where it was: `line` counts from 1."""

  line: int
  row: dict[str, Any]


def records(path: str, fields: Sequence[str], report: Report) -> Iterator[Record]:
  """The records of a file of a suffix in READERS, in order.

  Raises:
    ValueError: if that needs a module that is not installed, or as `Report.bad`.
    OSError: if the file cannot be read; others of `opening.errors` if it is damaged.
  """
  return READERS[suffix(path)](path, fields, report)


def json_lines(path: str, fields: Sequence[str], report: Report) -> Iterator[Record]:
  """A JSON object a line."""
  del fields
  with open_decompressed(path) as file:
    offset = 0
    for line, (raw, size) in enumerate(_lines(file), 1):
      report.records += 1
      where, start, offset = f"{path}:{line}", offset, offset + size
      raw = raw.removeprefix(codecs.BOM_UTF8)  # in front of each file that was joined on
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
    row = paths.parse_json(raw.decode())
  except UnicodeDecodeError as e:
    report.bad("not UTF-8", where, f"not UTF-8 at byte {start + e.start} of the file")
  except ValueError as e:
    report.bad("broken JSON", where, f"broken JSON ({e})")
  else:
    yield from _record(row, line, where, report)


def _record(row: Any, line: int, where: str, report: Report) -> Iterator[Record]:
  if isinstance(row, dict):
    yield Record(line, row)
  else:
    report.bad("not an object", where, f"expected a JSON object, got {type(row).__name__}")


def json_file(path: str, fields: Sequence[str], report: Report) -> Iterator[Record]:
  """What a .json file holds: JSON lines, one object, or a list of objects, as it begins."""
  with open_decompressed(path) as file:
    first, second = file.readline(LONGEST_LINE), file.readline(LONGEST_LINE)
  try:
    is_lines = isinstance(paths.parse_json(first.decode(errors="replace")), dict)
  except ValueError:
    is_lines = second.startswith(b"{")
  if is_lines:
    yield from json_lines(path, fields, report)
  else:
    yield from _json_values(path, report)


def _json_values(path: str, report: Report) -> Iterator[Record]:
  """The objects of a list, or those that follow one another; `line` counts them.

  Only one of them is in memory. Behind one that is broken nobody knows where the next one begins.
  """
  number = 0
  with open_decompressed(path) as raw:
    # What is not UTF-8 is kept as it is, so that only the object that holds it is left out.
    file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape")
    text = file.read(_BLOCK).lstrip()
    is_list = text.startswith("[")
    at, comma = int(is_list), False
    while True:
      at = _BLANK.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
      if at < len(text) and is_list and text[at] == "]":
        at, is_list = at + 1, False
      elif at < len(text) and is_list and comma and text[at] == ",":
        at, comma = at + 1, False
      elif at < len(text):
        number += 1
        where = f"{path}:{number}"
        try:
          value, end, text, at = _value(file, text, at)
        except ValueError as e:
          rest = "; what is behind it is not read"
          report.lost("broken JSON", where, f"broken JSON ({e}){rest}")
          return
        report.records += 1
        if _ESCAPED.search(text, at, end):
          report.bad("not UTF-8", where, "text that is not UTF-8")
        else:
          yield from _record(value, number, where, report)
        at, comma = end, True
      elif more := file.read(_BLOCK):
        text, at = more, 0
      else:
        break
    if is_list:
      report.lost("broken JSON", path, "broken JSON (the list has no end)")
    elif not number:
      report.records += 1
      report.skip("empty", path)


def _value(file: io.TextIOWrapper, text: str, at: int) -> tuple[Any, int, str, int]:
  """The JSON value at a place of `text`, its end, and the text that was read for it with its place.

  Raises:
    ValueError: if there is none.
  """
  while True:
    try:
      value, end = _DECODER.raw_decode(text, at)
      if end < len(text):  # else it may go on, if it is a number
        return value, end, text, at
      error = None
    except RecursionError:
      raise ValueError("it is nested too deeply") from None
    except ValueError as e:
      error = e
    if len(text) - at > LONGEST_LINE:
      raise ValueError(f"more than {LONGEST_LINE:,} characters without an end")
    text, at = text[at:], 0
    more = file.read(max(_BLOCK, len(text)))  # twice as much, as each try begins anew
    if not more:
      if error:
        raise error
      text += " "
    text += more


def delimited(path: str, fields: Sequence[str], report: Report) -> Iterator[Record]:
  """A row of a .csv or .tsv file, whose first row names the fields; `line` is where it begins."""
  del fields
  csv.field_size_limit(LONGEST_LINE)
  with open_decompressed(path) as raw:
    text = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape", newline="")
    lines = (line.removeprefix("\ufeff") for line in text)
    # A quote that is no end of a cell is an error, or else it would join rows in silence.
    rows = csv.reader(lines, delimiter="\t" if suffix(path) == ".tsv" else ",", strict=True)
    names: list[str] | None = None
    while True:
      begin = rows.line_num + 1
      where = f"{path}:{begin}"
      try:
        row = next(rows, None)
      except csv.Error as e:
        report.records += 1
        report.bad("broken CSV", where, f"broken CSV ({e})")
        continue
      if row is None:
        return
      if not row:  # a line without anything
        continue
      if names is None:
        names = row
        continue
      if row == names:  # of a file that was joined on
        continue
      report.records += 1
      if any(map(_ESCAPED.search, row)):
        report.bad("not UTF-8", where, "text that is not UTF-8")
      elif len(row) != len(names):
        detail = f"{len(row)} cells, where the first row names {len(names)} fields"
        report.bad("broken CSV", where, detail)
      else:
        yield Record(begin, dict(zip(names, row, strict=True)))


def array_record(path: str, fields: Sequence[str], report: Report) -> Iterator[Record]:
  """A JSON object a record of an ArrayRecord file."""
  del fields
  for line, raw in enumerate(tables.array_record(path), 1):
    report.records += 1
    yield from _object(raw, line, f"{path}:{line}", 0, report)


def table(path: str, fields: Sequence[str], report: Report) -> Iterator[Record]:
  """A row of a Parquet or Arrow file; a column that is not among `fields` is null."""
  rows = tables.parquet if suffix(path) == ".parquet" else tables.arrow
  line = 1
  for row in rows(path, fields):
    where = f"{path}:{line}"
    if isinstance(row, tables.LostRows):
      report.records += row.number
      detail = f"{row.number:,} rows cannot be read ({reason(row.error)})"
      report.bad("unreadable", where, detail, row.number)
      line += row.number
      continue
    report.records += 1
    if isinstance(row, UnicodeDecodeError):
      report.bad("not UTF-8", where, f"not UTF-8 at byte {row.start} of the value")
    elif isinstance(row, ValueError):
      report.bad("unreadable value", where, f"a value cannot be read ({reason(row)})")
    else:
      yield Record(line, row)
    line += 1


# By suffix. The first name of a reader is what cached data know it by.
READERS: dict[str, Callable[[str, Sequence[str], Report], Iterator[Record]]] = {
  ".jsonl": json_lines,
  ".ndjson": json_lines,
  ".json": json_file,
  ".csv": delimited,
  ".tsv": delimited,
  ".parquet": table,
  ".arrow": table,
  ".array_record": array_record,
  ".arrayrecord": array_record,
}
STREAMED = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # these may be compressed


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
