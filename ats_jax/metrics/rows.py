"""The rows of metrics.jsonl and metrics.csv: reading them back."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ats_jax.store import paths
from ats_jax.store.paths import Path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
  """Reads a metrics.jsonl back, non-finite numbers included.

  A last line without its newline (the run is writing it, or was killed) is left out.

  Raises:
    ValueError: another line is not a row of metrics; names the line.
  """
  rows = []
  for _, row in jsonl_rows(path):
    odd = row.pop("nonfinite", {})
    rows.append({**row, **{name: float(value) for name, value in odd.items()}})
  return rows


def jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields each complete line of a metrics.jsonl and the row it holds, as it is written.

  Raises:
    ValueError: a line is not a row of metrics; names the line.
  """
  for number, line in enumerate(_complete_lines(path), 1):
    yield line, jsonl_row(path, number, line)


def jsonl_row(path: Path, number: int, line: str) -> dict[str, Any]:
  """Returns the row that a line of a metrics.jsonl holds, as it is written.

  Raises:
    ValueError: the line, which is named, is not a row of metrics.
  """
  try:
    row = json.loads(line)
  except json.JSONDecodeError as error:
    raise _damaged(path, number, line) from error
  if not isinstance(row, dict) or not isinstance(row.get("step"), int):
    raise _damaged(path, number, line)
  return row


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
  """Returns the header of a metrics.csv and its complete rows, all cells as text.

  Raises:
    ValueError: a row does not fit the header; names the line.
  """
  header, *rows = list(csv.reader(_complete_lines(path))) or [["step", "wall_time"]]
  if header[:2] != ["step", "wall_time"]:
    raise _damaged(path, 1, ",".join(header))
  for number, row in enumerate(rows, 2):
    if len(row) != len(header) or not row[0].isdecimal():
      raise _damaged(path, number, ",".join(row))
  return header, rows


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
  """Returns the text of a CSV file with these rows."""
  text = io.StringIO()
  csv.writer(text, lineterminator="\n").writerows(rows)
  return text.getvalue()


def _complete_lines(path: Path) -> list[str]:
  """The lines that end in a newline. Bytes that are no text show up in the error, not as one."""
  # Not read_text: it would take a carriage return for a newline, and a torn line for a whole one.
  complete, newline, _ = paths.read_log(path).decode("utf-8", "replace").rpartition("\n")
  return complete.split("\n") if newline else []


def _damaged(path: Path, number: int, line: str) -> ValueError:
  return ValueError(
    f"{path}:{number}: not a row of metrics: {line[:80]!r}; repair or remove that line, "
    "or move the file away to start a new one"
  )
