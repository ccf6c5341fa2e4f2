"""Runs on disk: one JSON line each, appended when the run is done, so that a suite can go on."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[Any, ...]  # values of the fields that name a run
KEY = ("arm", "scenario", "seed")


class Results:
  """The runs of one results file, which several processes may append to; `records` by key."""

  def __init__(self, path: Path, protocol: str | None = None, fields: Sequence[str] = KEY):
    """Read what is there; `protocol` is what new runs are made under, None without any.

    Args:
      path: of the file.
      protocol: of all its runs.
      fields: those that name a run.

    Raises:
      ValueError: if a line is malformed, or runs of another protocol are there.
    """
    self.path, self._protocol, self._fields = path, protocol, fields
    self.records: dict[Key, Record] = {}
    for number, line in enumerate(_whole(path).splitlines(), 1):
      self._take(line, f"{path}:{number}")

  def _take(self, line: str, where: str) -> None:
    try:
      record = json.loads(line)
      key = self._key(record)
    except (json.JSONDecodeError, KeyError, TypeError) as e:
      raise ValueError(f"{where} is no run of a suite ({e}). Remove the line.") from e
    if self._protocol not in (None, record["protocol"]):
      raise ValueError(
        f"{where} was made under protocol {record['protocol']}, now it is {self._protocol}: the "
        "model, the data or the suite changed. Give another --results."
      )
    self.records[key] = record

  def add(self, record: Record) -> None:
    """Append a run, in one write; it is on disk when this returns."""
    record = {**record, "protocol": self._protocol}
    file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (json.dumps(record) + "\n").encode())
    os.fsync(file)
    os.close(file)
    self.records[self._key(record)] = record

  def _key(self, record: Record) -> Key:
    return tuple(record[name] for name in self._fields)


def _whole(path: Path) -> str:
  """The lines of a file but for one that was being written when a run was killed."""
  whole, newline, _ = (path.read_text("utf-8") if path.exists() else "").rpartition("\n")
  return whole + newline


def mend(path: Path) -> None:
  """Remove what was being written when a run was killed, which is made again."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(_whole(path), "utf-8")


def merged(paths: Iterable[Path]) -> list[Record]:
  """The runs of several files."""
  found = {key: record for path in paths for key, record in Results(path).records.items()}
  if not found:
    raise ValueError("--results holds no runs. Make some: python -m lab.faults run.")
  return list(found.values())
