"""The ledger: whole lines only, superseded ones left out, numbers that JSON does not have."""

import dataclasses
import json
import math

import pytest
from readings import INTERVAL, NAN_STATE, reading

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.orchestrator import actions
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.ledger import Ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.trials.arms import Arm, Proposal


@pytest.fixture
def path(tmp_path):
  return tmp_path / "decisions.jsonl"


def write(path, *lines):
  book = Ledger(path)
  for kind, step in lines:
    book.write(kind, step)
  book.close()


def steps(path):
  return [(row["kind"], row["step"]) for row in ledger.read_lines(path)]


def test_lines_after_the_step_that_is_resumed_do_not_count(path):
  write(path, ("start", 0), ("check", 10), ("check", 20), ("check", 30))
  write(path, ("resumed_from", 20), ("check", 30), ("check", 40))
  write(path, ("resumed_from", 10), ("check", 20))
  want = [("start", 0), ("check", 10), ("resumed_from", 10), ("check", 20)]
  assert steps(path) == want
  assert len(path.read_text().splitlines()) == 9  # nothing was removed


def test_a_run_that_begins_anew_begins_a_new_ledger(path):
  write(path, ("start", 0), ("check", 10))
  write(path, ("start", 0), ("check", 10))
  assert steps(path) == [("start", 0), ("check", 10)]


def test_half_a_line_of_a_killed_process_is_cut(path):
  write(path, ("start", 0), ("check", 10))
  with path.open("a") as file:
    file.write('{"v": 4, "kind": "che')
  assert steps(path) == [("start", 0), ("check", 10)]
  write(path, ("check", 20))
  assert steps(path) == [("start", 0), ("check", 10), ("check", 20)]


SETTINGS = dataclasses.asdict(OrchestratorConfig(mode="act", check_interval=INTERVAL))
WELL = {"level": "healthy", "causes": []}
HEALTHY = {"health": WELL, "stale": False, "request": None}
DEED = {"action": "SetLearningRateScale", "fields": {"scale": 0.5, "before": 1.0}}
ARM = Arm((actions.SetLearningRateScale(0.5),), "learning rate", 0.01)
PROPOSAL = Proposal("held-out loss", "it rose", (ARM, ARM), ("code",), {"code": 2.0})
ENDED = {"held": {"": 2.5, "code": math.inf}, "coming": [2.0, math.nan], "seen": math.nan}
WHOLE = (
  {"kind": "start", "step": 0, "settings": SETTINGS, "num_steps": 100, "warmup": 0, "peak": 1.0,
   "capacity": None, "compares": True, "accum_steps": 1},
  {"kind": "resumed_from", "step": 0},
  {"kind": "check", "step": INTERVAL, "reading": reading(1)._asdict(), **HEALTHY},
  {"kind": "decision", "step": INTERVAL, "id": 1, "cause": "learning rate",
   "reason": "too fast", "applied": True, **DEED},
  {"kind": "comparison", "step": 2 * INTERVAL, "first": 5, "proposal": PROPOSAL.to_json(),
   "waiting": ENDED, "scores": ["not made", ENDED], "made": 30},
  {"kind": "given_up", "step": 2 * INTERVAL, "first": 5, "reason": "other rules"},
  {"kind": "refused", "step": 2 * INTERVAL, "reason": "no slot"},
)  # fmt: skip


def write_rows(path, rows):
  with path.open("w") as file:
    for row in rows:
      print(json.dumps({"v": 4, **ledger.encode(row)}), file=file)


def test_whole_lines_are_told_in_order(path):
  write_rows(path, WHOLE)
  story = tell(path)
  assert [line.split()[1] for line in story[:-3]] == ["0", "0", "10", "20", "20", "20"]
  assert story[-3:] == [
    "1 looks: 1 healthy",
    "1 decisions, 1 carried out",
    f"last look: training loss {reading(1).loss:.4g}, healthy",
  ]
  (step, decision), = ledger.decisions(path)  # fmt: skip
  assert step == INTERVAL and decision.action == actions.SetLearningRateScale(0.5)
  assert ledger.replay(path) == []


# What is done to a line -> its place in WHOLE, what changes, who notices.
EDITS = {
  "no version": (2, {"v": None}, ledger.read_lines),
  "no kind": (2, {"kind": None}, ledger.read_lines),
  "unknown kind": (2, {"kind": "chekc"}, ledger.read_lines),
  "kind that is no word": (2, {"kind": []}, ledger.read_lines),
  "step that is no number": (2, {"step": "40"}, ledger.read_lines),
  "step that is a truth value": (2, {"step": True}, ledger.read_lines),
  "no settings": (0, {"settings": None}, tell),
  "unknown mode": (0, {"settings": SETTINGS | {"mode": "nap"}}, tell),
  "no settings to replay": (0, {"settings": None}, ledger.replay),
  "unknown setting to replay": (0, {"settings": {"naps": 3}}, ledger.replay),
  "no health": (2, {"health": None}, tell),
  "health that is a word": (2, {"health": "good"}, tell),
  "level that is a list": (2, {"health": {"level": [], "causes": []}}, tell),
  "no health where nothing was concluded": (2, {"health": {}, "stale": True}, tell),
  "reading that is a number": (2, {"reading": 3}, tell),
  "reading that is a number, replayed": (2, {"reading": 3}, ledger.replay),
  "reading with a word": (2, {"reading": reading(1)._asdict() | {"loss": "low"}}, ledger.replay),
  "unknown action": (3, {"action": "Dance"}, tell),
  "unknown action, read back": (3, {"action": "Dance"}, ledger.decisions),
  "action without its fields": (3, {"fields": {}}, ledger.decisions),
  "comparison without scores": (4, {"scores": None}, tell),
  "loss that is a word": (4, {"waiting": ENDED | {"seen": "better"}}, tell),
  "arms that are a number": (4, {"proposal": PROPOSAL.to_json() | {"arms": 3}}, tell),
  "reason that was taken out": (5, {"reason": None}, tell),
}


@pytest.mark.parametrize(("place", "changes", "read"), EDITS.values(), ids=EDITS)
def test_an_edited_line_is_named(path, place, changes, read):
  """A value None stands for a field that was taken out."""
  edited = {"v": 4, **WHOLE[place], **changes}
  edited = {name: value for name, value in edited.items() if changes.get(name, 1) is not None}
  rows = [{"v": 4, **row} for row in WHOLE]
  rows[place] = edited
  path.write_text("".join(json.dumps(ledger.encode(row)) + "\n" for row in rows))
  with pytest.raises(ValueError, match=rf"decisions\.jsonl:{place + 1}: not a line of"):
    read(path)


@pytest.mark.parametrize(
  "line",
  [
    b"rubbish",
    b"\xff",
    b"",
    b"[1, 2]",
    b"3",
    b"null",
    b'{"v": 4, "step',
    b'{"v": 1, "kind": "check", "step": 3}',
  ],
)
def test_rubbish_is_named(path, line):
  write_rows(path, WHOLE[:2])
  path.write_bytes(path.read_bytes() + line + b"\n")
  with pytest.raises(ValueError, match=r"decisions\.jsonl:3: not a line of an orchestrator's dec"):
    ledger.read_lines(path)


def test_numbers_that_are_not_finite_come_back(path):
  seen = reading(3, **NAN_STATE, applied=math.inf)
  book = Ledger(path)
  book.write("check", INTERVAL, reading=seen._asdict())
  book.close()
  text = path.read_text()
  json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
  found = ledger.decode(ledger.read_lines(path)[0]["reading"])
  assert math.isnan(found.probe) and found.applied == math.inf
  assert found._replace(held={}) == seen._replace(held={})
