"""The ledger: whole lines only, superseded ones left out, numbers that JSON does not have."""

import json
import math

import pytest
from readings import INTERVAL, NAN_STATE, reading

from ats_jax.orchestrator import ledger
from ats_jax.orchestrator.ledger import Ledger


@pytest.fixture
def path(tmp_path):
  return tmp_path / "decisions.jsonl"


def write(path, *lines):
  book = Ledger(path)
  for kind, step in lines:
    book.write(kind, step)
  book.close()


def steps(path):
  return [(row["kind"], row["step"]) for row in ledger.rows(path)]


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
    file.write('{"v": 1, "kind": "che')
  assert steps(path) == [("start", 0), ("check", 10)]
  write(path, ("check", 20))
  assert steps(path) == [("start", 0), ("check", 10), ("check", 20)]


@pytest.mark.parametrize("line", ['{"v": 1, "step', '{"v": 2, "kind": "check", "step": 3}'])
def test_a_damaged_line_is_an_error_that_names_the_file(path, line):
  write(path, ("start", 0))
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(ValueError, match=r"decisions\.jsonl"):
    ledger.rows(path)


def test_numbers_that_are_not_finite_come_back(path):
  seen = reading(3, **NAN_STATE, cusum=math.inf)
  book = Ledger(path)
  book.write("check", INTERVAL, reading=seen._asdict())
  book.close()
  text = path.read_text()
  json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
  found = ledger.decode(ledger.rows(path)[0]["reading"])
  assert math.isnan(found.probe) and found.cusum == math.inf
  assert found._replace(probe=0.0) == seen._replace(probe=0.0)
