"""Runs on disk: one JSON line each, appended when the run is done, so that a suite can go on."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, str, int]  # arm, scenario, seed


class Results:
  """The runs of one results file.

  Attributes:
    records: by arm, scenario and seed.
  """

  def __init__(self, path: Path, protocol: str | None = None):
    """Read what is there.

    Args:
      path: a file of JSON lines; need not exist.
      protocol: what new runs are made under; None = that is in their records.

    Raises:
      ValueError: if a line is malformed, or runs of another protocol are there.
    """
    self.path, self._protocol = path, protocol
    self.records: dict[Key, Record] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole, newline, torn = text.rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
      self._take(line, number)
    if torn and protocol is not None:  # a run was killed as it wrote: it is repeated
      path.write_text(whole + newline, encoding="utf-8")

  def _take(self, line: str, number: int) -> None:
    where = f"{self.path}:{number}"
    try:
      record = json.loads(line)
      key = record["arm"], record["scenario"], record["seed"]
    except (json.JSONDecodeError, KeyError, TypeError) as e:
      raise ValueError(f"{where} is no run of a suite ({e}). Remove the line.") from e
    if self._protocol not in (None, record["protocol"]):
      raise ValueError(
        f"{where} was made under protocol {record['protocol']}, now it is {self._protocol}: the "
        "model, the data or the suite changed. Give another --results."
      )
    self.records[key] = record

  def take(self, other: Path) -> None:
    """Append the runs of another file that are missing here, and remove it."""
    for key, record in Results(other, self._protocol).records.items():
      if key not in self.records:
        self.add(record)
    other.unlink()

  def add(self, record: Record) -> None:
    """Append a run; it is on disk when this returns."""
    if self._protocol is not None:
      record = {**record, "protocol": self._protocol}
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self.path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(record) + "\n")
      file.flush()
      os.fsync(file.fileno())
    self.records[record["arm"], record["scenario"], record["seed"]] = record


def merged(paths: Iterable[Path]) -> list[Record]:
  """The runs of several files.

  Raises:
    ValueError: if two of them hold the same run, or a file holds none.
  """
  found: dict[Key, tuple[Path, Record]] = {}
  for path in paths:
    records = Results(path).records
    if not records:
      raise ValueError(f"--results={path} holds no runs. Make some: python -m lab.faults run.")
    for key, record in records.items():
      if key in found:
        raise ValueError(f"{found[key][0]} and {path} both hold {key}. Give one of them.")
      found[key] = path, record
  return [record for _, record in found.values()]
