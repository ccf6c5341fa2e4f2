"""A run that is killed and started again equals one that was never interrupted, bit for bit."""

import signal
from pathlib import Path

import pytest
import runs

STEPS = 40
SETTINGS = (
  f"num_steps={STEPS}",
  "optimizer.warmup_steps=5",
  "model.num_layers=2",
  "model.d_model=32",
  "model.d_ff=64",
  "model.dropout=0.1",
  "data.tokenizer=bytes",
  "data.seq_len=32",
  "data.batch_size=8",
  "data.num_workers=2",
  "step.accum_steps=2",
  "optimizer.ema_decay=0.9",
  "checkpoint.every_steps=7",
  "eval.every_steps=14",
  "eval.num_batches=4",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "sample.max_tokens=8",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> tuple[str, ...]:
  text = tmp_path_factory.mktemp("text")
  for i in range(40):
    (text / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox. " * (3 + 7 * i % 50))
  return (*SETTINGS, f"data.paths={text}", "data.validation_fraction=0.2")


@pytest.fixture(scope="module")
def uninterrupted(settings, tmp_path_factory) -> Path:
  workdir = tmp_path_factory.mktemp("uninterrupted")
  runs.finish(runs.start(workdir, *settings))
  return workdir


def test_kills_and_a_sigterm_change_nothing(settings, uninterrupted, tmp_path):
  """Kill -9 before the first checkpoint, in a write, between two; SIGTERM; then to the end."""
  start = lambda: runs.start(tmp_path, *settings)
  runs.stop_at(start(), 4, signal.SIGKILL)
  assert not list((tmp_path / "checkpoints").glob("[0-9]*"))

  process = start()
  killed_in = runs.kill_while_writing(process, tmp_path, after_step=7)
  assert not (tmp_path / "checkpoints" / killed_in.split(".")[0]).exists()

  output = runs.stop_at(start(), 24, signal.SIGKILL)
  assert "resuming" in output

  process = start()
  output = runs.stop_at(process, 30, signal.SIGTERM)
  assert process.returncode == 0, output
  assert "The same command goes on from there" in output

  output = runs.finish(start())
  assert f"resuming {tmp_path} from step" in output
  runs.assert_same_run(uninterrupted, tmp_path, STEPS)


@pytest.mark.compat
def test_a_complete_run_says_so(settings, uninterrupted):
  before = runs.rows(uninterrupted)
  output = runs.finish(runs.start(uninterrupted, *settings))
  assert f"is complete: step {STEPS} of {STEPS}" in output
  assert runs.rows(uninterrupted) == before


def test_other_seed_differs(settings, uninterrupted, tmp_path):
  """The comparison can fail: another seed gives another run."""
  runs.finish(runs.start(tmp_path, *settings, "seed=1"))
  with pytest.raises(AssertionError):
    runs.assert_same_run(uninterrupted, tmp_path, STEPS)
