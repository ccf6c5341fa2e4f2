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

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.metrics.rows import jsonl_rows
from ats_jax.orchestrator import actions
from ats_jax.orchestrator.memory import Memory
from ats_jax.orchestrator.plateau import Branch, Plateau, conclude
from ats_jax.orchestrator.policy import Decision, Judgement, decide
from ats_jax.orchestrator.reading import Reading
from ats_jax.orchestrator.requests import Request

VERSION = 1


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


def rows(path: Path) -> list[dict[str, Any]]:
  """The lines that count, in order: without those that a resumed run has superseded.

  Raises:
    ValueError: if a line is damaged, or of another version.
  """
  kept: list[dict[str, Any]] = []
  for _, row in jsonl_rows(path):
    if row.get("v") != VERSION:
      raise ValueError(
        f"{path}: a line of version {row.get('v')!r}, this program reads {VERSION}: {row}"
      )
    if row["kind"] == "start" and row["step"] == 0:  # killed before its first checkpoint
      kept = []
    if row["kind"] == "resumed_from":
      kept = [r for r in kept if r["step"] <= row["step"]]
    kept.append(row)
  return kept


def decisions(path: Path) -> list[tuple[int, Decision]]:
  """The decisions that a ledger records, with the steps at which they were taken."""
  return [
    (
      row["step"],
      Decision(
        row["id"],
        actions.from_json({"action": row["action"], **row["fields"]}),
        row["cause"],
        row["confidence"],
        row["reason"],
      ),
    )
    for row in rows(path)
    if row["kind"] == "decision"
  ]


def replay(path: Path) -> list[tuple[int, Decision]]:
  """Decide again from the readings of a ledger; gives `decisions(path)`, or they are not its."""
  return [
    (step, decision) for step, judgement in _replayed(path) for decision in judgement.decisions
  ]


def _replayed(path: Path) -> Iterator[tuple[int, Judgement]]:
  cfg, bucket, memory = OrchestratorConfig(), 0.0, Memory()
  for row in rows(path):
    if row["kind"] == "start":
      cfg, bucket = OrchestratorConfig(**row["settings"]), row["bucket"]
    elif row["kind"] == "check":
      reading, step, pause = decode(row["reading"]), row["step"], row["pause"]
      asked = row.get("request")
      request = None if asked is None else Request.from_json(asked)
      memory, judgement = decide(cfg, memory, reading, step, bucket, pause=pause, request=request)
      yield row["step"], judgement
    elif row["kind"] == "rerun":
      branch = Branch(*(float(row[name]) for name in Branch._fields))
      _, memory, decision = conclude(cfg, Plateau(), memory, branch, row["step"])
      yield row["step"], Judgement(decisions=(decision,) if decision else ())


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
  return Reading(**values)
