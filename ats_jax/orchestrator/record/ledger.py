"""`decisions.jsonl`: what was seen, what was compared, what was done. Append-only.

One JSON object a line, each with "v" (version of the format), "kind" and "step":

  start        the settings; at the beginning of a workdir, or when they changed
  resumed_from the run goes on from this step: lines of later steps before it no longer count
  check        a look: the reading, the health report, what a hook asks for, evaluations
  bounded      steps of an interval that were left out or shrunk, their tokens and rows
  loss_scale   what became of it in an interval: steps left out, steps after which it doubled
  comparison   what was compared since `first`, where each arm ended, updates that it took, and
               training losses of the steps that the winner made, the last of which is this one
  given_up     a comparison under way that was dropped, and why
  waits        what a hook asked for and is not done yet, and why
  refused      what a hook asked for and is not possible, and why
  decision     id, action and its fields, cause, reason, applied, and what it came to

Numbers that are not finite are the strings "nan", "inf" and "-inf".
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator.actions import Action, from_json
from ats_jax.orchestrator.actions.base import frozen
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.state import Decision, Judgement, PolicyState, Request
from ats_jax.orchestrator.signals.interval import Finding, Reading, SourceLoss
from ats_jax.orchestrator.trials.arms import Compared
from ats_jax.store import paths
from ats_jax.store.paths import Log, Path

VERSION = 4
KINDS = (
  "start", "resumed_from", "check", "bounded", "loss_scale", "comparison", "given_up", "waits",
  "refused", "decision", "weighed",
)  # fmt: skip


class LedgerLine(dict[str, Any]):
  """The fields of a line of the ledger, by name.

  Attributes:
    number: number of the line in its file, from 1.
  """

  def __init__(self, number: int, fields: Mapping[str, Any]):
    """Make the line `number` with these fields."""
    super().__init__(fields)
    self.number = number


class Ledger:
  """Appends to a ledger in process 0; see `paths.Log` for what a process that is killed loses."""

  def __init__(self, path: Path | None):
    """Open `path` for more, first cutting the last line if a killed process left half of it.

    None = nothing is written.
    """
    self._file = None
    if path is not None and jax.process_index() == 0:
      content = paths.read_log(path) if path.exists() else b""
      self._file = Log(path, content[: content.rfind(b"\n") + 1])

  def write(self, kind: str, step: int, action: Action | None = None, **fields: Any) -> None:
    """Append a line; of an action its name and its fields."""
    if self._file is None:
      return
    row = {"v": VERSION, "kind": kind, "step": step, **fields}
    if action is not None:
      row["fields"] = action.to_json()
      row["action"] = row["fields"].pop("action")
    self._file.write(json.dumps(encode(row), allow_nan=False).encode() + b"\n")

  def flush(self) -> None:
    """Make it durable."""
    if self._file is not None:
      self._file.flush()

  def close(self) -> None:
    """Make it durable and end."""
    if self._file is not None:
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


def read_lines(path: Path) -> list[LedgerLine]:
  """The lines that count, in order: without those that a resumed run has superseded.

  A last line without its newline (the run is writing it, or was killed) is left out.

  Raises:
    ValueError: if a line is damaged, or of another version; names the line.
  """
  lines: list[LedgerLine] = []
  for number, text in enumerate(paths.read_log(path).split(b"\n")[:-1], 1):
    with reading(path, number):
      line = _parse_line(number, text)
    if line["kind"] == "start" and line["step"] == 0:  # killed before its first checkpoint
      lines = []
    if line["kind"] == "resumed_from":
      lines = [r for r in lines if r["step"] <= line["step"]]
    lines.append(line)
  return lines


def _parse_line(number: int, line: bytes) -> LedgerLine:
  row = LedgerLine(number, {**json.loads(line)})
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
  for row in read_lines(path):
    if row["kind"] == "decision":
      with reading(path, row.number):
        decision = Decision(row["id"], action_of(row), row["cause"], row["reason"])
        made.append((row["step"], decision))
  return made


def replay(path: Path) -> list[tuple[int, Decision]]:
  """Decide again from the readings of a ledger; gives `decisions(path)`, or they are not its.

  Raises:
    ValueError: if a line cannot be read; names it.
  """
  terms, policy = Terms(OrchestratorConfig()), PolicyState()
  made: list[tuple[int, Decision]] = []
  for row in read_lines(path):
    with reading(path, row.number):
      if row["kind"] == "start":
        facts = {name: row[name] for name in Terms._fields if name in row}
        terms = Terms(OrchestratorConfig(**row["settings"]), **facts)
      elif row["kind"] in ("check", "comparison"):
        policy, judgement = decide(terms, policy, _seen(row), row["step"])
        made += [(row["step"], decision) for decision in judgement.decisions]
  return made


def _seen(row: Mapping[str, Any]) -> Interval | Compared:
  """What `decide` was told."""
  if row["kind"] == "comparison":
    return Compared.from_json(row)
  asked = row["request"]
  request = None if asked is None else Request.from_json(asked)
  evaluated = tuple(map(float, row.get("evaluated", ())))
  return Interval(decode(row["reading"]), request, evaluated)


def action_of(row: Mapping[str, Any]) -> Action:
  """The action that a line is of."""
  return from_json({"action": row["action"], **row["fields"]})


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
  numbers = {name for name in Reading._fields if name not in ("tensor", "faults")}
  values = {name: frozen(fields[name], words=False) for name in fields.keys() & numbers}
  values["faults"] = tuple(Finding(*parts) for parts in fields["faults"])
  values["tensor"] = fields["tensor"]
  values["sources"] = {name: SourceLoss(*parts) for name, parts in values["sources"].items()}
  return Reading(**values)


def check_agreement(
  policy: PolicyState,
  seen: Mapping[str, Any],
  judgement: Judgement,
  waiting: Sequence[Mapping[str, Any]] = (),
) -> None:
  """Do all processes see, remember and decide the same? Called before anything is done.

  Args:
    policy: its state.
    seen: what it looked at, as JSON values.
    judgement: what it concluded.
    waiting: requests, as JSON values.

  Raises:
    RuntimeError: on every process, if two differ.
  """
  if jax.process_count() == 1:
    return
  acts = [decision.action.to_json() for decision in judgement.decisions]
  proposal = judgement.proposal and judgement.proposal.to_json()
  known = json.dumps([policy.to_json(), seen, acts, proposal, waiting], sort_keys=True)
  digest = np.frombuffer(hashlib.sha256(known.encode()).digest()[:8], np.uint32)
  if len(np.unique(multihost_utils.process_allgather(digest), axis=0)) > 1:
    raise RuntimeError(
      f"processes see or decide differently at look {policy.looks}; nothing was done. A device "
      "computes wrongly, programs or library versions differ, or a hook asks for something in one "
      "process only. Restart the job from the last checkpoint on machines with one environment."
    )
