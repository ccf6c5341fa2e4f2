"""`decisions.jsonl`: what was seen, what was done, what that changed. Append-only.

One JSON object a line, each with "v" (version of the format), "kind" and "step":

  start        the settings; at the beginning of a workdir, or when they changed
  resumed_from the run goes on from this step: lines of later steps before it no longer count
  check        a look: the reading, the health report, what a hook asks for
  branch       what was tried ahead, and what it changed: mean and its error, in nats
  rerun        steps made again with a higher learning rate: from which step, and the losses
  refused      what a hook asked for and is not possible, and why
  decision     id, action and its fields, cause, confidence, reason, applied, and what it came to
  outcome      id, verdict, before and after (nats above the reference)

Numbers that are not finite are the strings "nan", "inf" and "-inf".
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator import actions
from ats_jax.orchestrator.policy.decide import Decision, Judgement, decide
from ats_jax.orchestrator.policy.plateau import Branch, Plateau, conclude
from ats_jax.orchestrator.policy.requests import Request
from ats_jax.orchestrator.policy.state import Memory
from ats_jax.orchestrator.signals.interval import Reading

VERSION = 1
KINDS = (
  "start", "resumed_from", "check", "branch", "rerun", "refused", "decision", "outcome"
)  # fmt: skip


class Row(dict[str, Any]):
  """What a line holds.

  Attributes:
    number: of the line in its file, from 1.
  """

  def __init__(self, number: int, fields: Mapping[str, Any]):
    """Take what `fields` has."""
    super().__init__(fields)
    self.number = number


class Ledger:
  """Appends to a ledger; a line is with the operating system when `write` returns."""

  def __init__(self, path: Path):
    """Open `path` for more, first cutting the last line if a killed process left half of it."""
    if path.exists():
      whole = path.read_bytes()
      end = whole.rfind(b"\n") + 1
      if end < len(whole):
        os.truncate(path, end)
    self._file = path.open("a", buffering=1, encoding="utf-8")

  def write(self, kind: str, step: int, **fields: Any) -> None:
    """Append a line."""
    row = {"v": VERSION, "kind": kind, "step": step, **fields}
    self._file.write(json.dumps(encode(row), allow_nan=False) + "\n")

  def close(self) -> None:
    """Make it durable."""
    self._file.flush()
    os.fsync(self._file.fileno())
    self._file.close()


@contextlib.contextmanager
def reading(path: Path, number: int) -> Iterator[None]:
  """Name the line, if what is read from it is not there or is something else.

  Raises:
    ValueError: in place of what was raised.
  """
  try:
    yield
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path}:{number}: not a line of an orchestrator's decisions ({type(error).__name__}: "
      f"{error}). Was the file edited? Restore that line, or remove it."
    ) from error


def rows(path: Path) -> list[Row]:
  """The lines that count, in order: without those that a resumed run has superseded.

  A last line without its newline (the run is writing it, or was killed) is left out.

  Raises:
    ValueError: if a line is damaged, or of another version; names the line.
  """
  kept: list[Row] = []
  for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
    with reading(path, number):
      row = _row(number, line)
    if row["kind"] == "start" and row["step"] == 0:  # killed before its first checkpoint
      kept = []
    if row["kind"] == "resumed_from":
      kept = [r for r in kept if r["step"] <= row["step"]]
    kept.append(row)
  return kept


def _row(number: int, line: bytes) -> Row:
  row = Row(number, {**json.loads(line)})
  if row["v"] != VERSION:
    raise ValueError(f"it is of version {row['v']!r}, this program reads {VERSION}")
  if row["kind"] not in KINDS:
    raise ValueError(f"kind {row['kind']!r} is none of {', '.join(KINDS)}")
  if type(row["step"]) is not int:
    raise ValueError(f"step {row['step']!r} is no whole number")
  return row


def decisions(path: Path) -> list[tuple[int, Decision]]:
  """The decisions that a ledger records, with the steps at which they were taken.

  Raises:
    ValueError: if a line cannot be read; names it.
  """
  made = []
  for row in rows(path):
    if row["kind"] == "decision":
      with reading(path, row.number):
        action = actions.from_json({"action": row["action"], **row["fields"]})
        rest = (row["cause"], row["confidence"], row["reason"])
        made.append((row["step"], Decision(row["id"], action, *rest)))
  return made


def replay(path: Path) -> list[tuple[int, Decision]]:
  """Decide again from the readings of a ledger; gives `decisions(path)`, or they are not its.

  Raises:
    ValueError: if a line cannot be read; names it.
  """
  cfg, bucket, memory = OrchestratorConfig(), 0.0, Memory()
  made: list[tuple[int, Decision]] = []
  for row in rows(path):
    judgement = Judgement()
    with reading(path, row.number):
      if row["kind"] == "start":
        cfg, bucket = OrchestratorConfig(**row["settings"]), row["bucket"]
      elif row["kind"] == "check":
        seen, step, pause = decode(row["reading"]), row["step"], row["pause"]
        asked = row.get("request")
        request = None if asked is None else Request.from_json(asked)
        memory, judgement = decide(cfg, memory, seen, step, bucket, pause=pause, request=request)
      elif row["kind"] == "rerun":
        branch = Branch(*(float(row[name]) for name in Branch._fields))
        _, memory, decision = conclude(cfg, Plateau(), memory, branch, row["step"])
        judgement = Judgement(decisions=(decision,) if decision else ())
    made += [(row["step"], decision) for decision in judgement.decisions]
  return made


def encode(value: Any) -> Any:
  """JSON has no NaN and no infinities."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, Mapping):
    return {key: encode(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return [encode(v) for v in value]
  return value


def decode(fields: Mapping[str, Any]) -> Reading:
  """The reading that `encode` wrote."""
  number = lambda x: float(x) if isinstance(x, str) else x
  values: dict[str, Any] = {name: number(x) for name, x in fields.items() if name != "means"}
  values["means"] = {name: number(x) for name, x in fields["means"].items()}
  values["starved"] = tuple((layer, expert) for layer, expert in fields["starved"])
  values["rules"] = tuple(fields.get("rules", ()))
  return Reading(**values)
