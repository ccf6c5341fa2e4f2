"""Real processes under the orchestrator: kill -9, resumption, and the story of the run."""

import signal

import pytest
import runs
from commands import called

from ats_jax.orchestrator.record import ledger

pytestmark = pytest.mark.thorough

SETTINGS = (
  *runs.TINY,
  "num_steps=30",
  "data.seq_len=32",
  "data.batch_size=8",
  "optimizer.warmup_steps=5",
  "checkpoint.every_steps=10",
  "sample.max_tokens=0",
  "orchestrator.mode=act",
  "orchestrator.check_interval=5",
)


def seen(workdir):
  """What was read at each look, and what was decided, of the run as it counts."""
  rows = ledger.read_lines(workdir / "decisions.jsonl")
  checks = [(row["step"], row["reading"]) for row in rows if row["kind"] == "check"]
  return checks, ledger.decisions(workdir / "decisions.jsonl")


def test_kill_9_leaves_a_ledger_that_goes_on_where_the_checkpoint_is(text, tmp_path):
  settings = (*SETTINGS, f"data.paths={text}")
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  runs.finish(runs.start(whole, *settings))
  runs.stop_at(runs.start(killed, *settings), 23, signal.SIGKILL)
  runs.finish(runs.start(killed, *settings))
  assert seen(killed) == seen(whole)
  assert len(seen(whole)[0]) == 6
  kinds = [row["kind"] for row in ledger.read_lines(killed / "decisions.jsonl")]
  assert kinds.count("resumed_from") == 1

  told = called("decisions", str(killed), "--replay")
  assert told.code == 0, told.err
  assert "resumed from here" in told.out and "replayed: the same decisions" in told.out
