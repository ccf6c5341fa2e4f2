"""A run that is killed and started again equals one that was never interrupted, bit for bit."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import runs
from commands import called, train_flags
from program_cache import user_cache

from ats_jax.exits import STOPPED
from ats_jax.metrics.rows import read_jsonl

pytestmark = pytest.mark.thorough

STEPS = 20
# Router biases, loads and thresholds are part of the state.
SETTINGS = (
  f"num_steps={STEPS}",
  "optimizer.warmup_steps=5",
  "model.num_layers=2",
  "model.d_model=32",
  "model.d_ff=64",
  "model.dropout=0.1",
  "moe.num_experts=4",
  "moe.d_ff=32",
  "moe.null_experts=2",
  "moe.noise=0.1",
  "moe.sequence_aux_loss=0.01",
  "mod.routing=learned",
  "mod.capacity=0.25",
  "data.tokenizer=bytes",
  "data.seq_len=32",
  "data.batch_size=8",
  "data.num_workers=2",
  "data.validation_fraction=0.2",
  "step.accum_steps=2",
  "step.remat=names",
  "precision.deterministic=True",
  "optimizer.ema_decay=0.9",
  "checkpoint.every_steps=5",
  "eval.every_steps=10",
  "eval.num_batches=4",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "sample.max_tokens=0",
)


@pytest.fixture(scope="module")
def settings(text) -> tuple[str, ...]:
  return (*SETTINGS, f"data.paths={text}")


def finish(workdir: Path, settings: tuple[str, ...]) -> str:
  """Train to the end; what the run said."""
  result = called("train", *train_flags(workdir, *settings))
  assert result.code == 0, result.err
  return result.out + result.err


@pytest.fixture(scope="module")
def uninterrupted(settings, tmp_path_factory) -> Path:
  """A whole run, which leaves its compiled programs to those that are killed."""
  workdir = tmp_path_factory.mktemp("uninterrupted")
  finish(workdir, settings)
  return workdir


def layers(workdir: Path) -> list[dict]:
  """What is logged of each layer."""
  rows = read_jsonl(workdir / "layers.jsonl")
  return [{k: v for k, v in row.items() if k != "wall_time"} for row in rows]


def test_a_kill_and_a_sigterm_change_nothing(settings, uninterrupted, tmp_path):
  """Kill -9 in a write; SIGTERM between two; then to the end."""
  cache, run = str(user_cache(tmp_path / "cache")), tmp_path / "run"
  start = lambda: runs.start(run, *settings, XDG_CACHE_HOME=cache)
  killed_in = runs.kill_while_writing(start(), run, after_step=5)
  assert not (run / "checkpoints" / killed_in.split(".")[0]).exists()

  process = start()
  output = runs.stop_at(process, 14, signal.SIGTERM)
  assert process.returncode == STOPPED, output
  assert f"resuming {run} from step" in output
  assert "The same command goes on from there" in output

  assert f"resuming {run} from step" in finish(run, settings)
  runs.assert_same_run(uninterrupted, run, STEPS)
  assert layers(uninterrupted) == layers(run) and len(layers(run)) == STEPS


def test_a_complete_run(settings, uninterrupted):
  """It says so when it is started again, its state is whole, and it can be used."""
  before = runs.rows(uninterrupted)
  assert f"is complete: step {STEPS} of {STEPS}" in finish(uninterrupted, settings)
  assert runs.rows(uninterrupted) == before
  assert all(len(row) > 2 for row in read_jsonl(uninterrupted / "metrics.jsonl"))  # step and time
  names = " ".join(runs.arrays(uninterrupted, STEPS))
  assert all(buffer in names for buffer in ("bias_E", "load_E", "threshold", "updates"))

  logged = runs.rows(uninterrupted, "eval/loss")[-1]["eval/loss"]
  evaluated = called("evaluate", f"--workdir={uninterrupted}")
  assert f"eval/loss {logged:.6g}" in evaluated.out.splitlines(), evaluated.err


def test_the_comparison_can_fail(uninterrupted, tmp_path):
  """Other arrays, and a loss that differs in one digit."""
  last, earlier = (runs.arrays(uninterrupted, step) for step in (STEPS, STEPS - 5))
  assert not all(np.array_equal(last[name], earlier[name]) for name in last)
  other = shutil.copytree(uninterrupted, tmp_path / "other")
  rows = read_jsonl(other / "metrics.jsonl")
  rows[3]["train/loss"] += 1e-6
  (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  with pytest.raises(AssertionError):
    runs.assert_same_run(uninterrupted, other, STEPS)
