"""A run that is killed and started again equals one that was never interrupted, bit for bit."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import runs
from commands import called
from program_cache import user_cache

from ats_jax.exits import STOPPED
from ats_jax.metrics.rows import read_jsonl

pytestmark = pytest.mark.thorough

STEPS = 26
# Router biases, loads and thresholds are part of the state; capacity goes on where it was.
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
  "mod.anneal_fraction=0.5",
  "mod.rungs=2",
  "data.tokenizer=bytes",
  "data.seq_len=32",
  "data.batch_size=8",
  "data.num_workers=2",
  "step.accum_steps=2",
  "optimizer.ema_decay=0.9",
  "checkpoint.every_steps=5",
  "eval.every_steps=13",
  "eval.num_batches=4",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "sample.max_tokens=0",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> tuple[str, ...]:
  text = tmp_path_factory.mktemp("text")
  for i in range(40):
    (text / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox. " * (3 + 7 * i % 50))
  return (*SETTINGS, f"data.paths={text}", "data.validation_fraction=0.2")


@pytest.fixture(scope="module")
def start(settings, tmp_path_factory) -> Callable[..., subprocess.Popen]:
  """Starts a run in a folder; the first, which nothing kills, compiles the programs of all."""
  cache = str(user_cache(tmp_path_factory.mktemp("cache")))
  return lambda workdir, *more: runs.start(workdir, *settings, *more, XDG_CACHE_HOME=cache)


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory) -> Path:
  workdir = tmp_path_factory.mktemp("uninterrupted")
  runs.finish(start(workdir))
  return workdir


def test_kills_and_a_sigterm_change_nothing(start, uninterrupted, tmp_path):
  """Kill -9 before the first checkpoint, in a write, between two; SIGTERM; then to the end."""
  runs.stop_at(start(tmp_path), 3, signal.SIGKILL)
  assert not list((tmp_path / "checkpoints").glob("[0-9]*"))

  process = start(tmp_path)
  killed_in = runs.kill_while_writing(process, tmp_path, after_step=5)
  assert not (tmp_path / "checkpoints" / killed_in.split(".")[0]).exists()

  output = runs.stop_at(
    start(tmp_path), 17, signal.SIGKILL
  )  # saving step 15 waits for that of step 10
  assert "resuming" in output

  process = start(tmp_path)
  output = runs.stop_at(process, 20, signal.SIGTERM)
  assert process.returncode == STOPPED, output
  assert "The same command goes on from there" in output

  output = runs.finish(start(tmp_path))
  assert f"resuming {tmp_path} from step" in output
  runs.assert_same_run(uninterrupted, tmp_path, STEPS)
  layers = [
    [{k: v for k, v in row.items() if k != "wall_time"} for row in read_jsonl(f / "layers.jsonl")]
    for f in (uninterrupted, tmp_path)
  ]
  assert layers[0] == layers[1] and len(layers[0]) == STEPS


def test_a_complete_run(start, uninterrupted):
  """It says so when it is started again, its state is whole, and it can be used."""
  before = runs.rows(uninterrupted)
  output = runs.finish(start(uninterrupted))
  assert f"is complete: step {STEPS} of {STEPS}" in output
  assert runs.rows(uninterrupted) == before
  names = " ".join(runs.arrays(uninterrupted, STEPS))
  assert all(buffer in names for buffer in ("bias_E", "load_E", "threshold", "updates"))

  logged = runs.rows(uninterrupted, "eval/loss")[-1]["eval/loss"]
  evaluated = called("evaluate", f"--workdir={uninterrupted}")
  assert f"eval/loss {logged:.6g}" in evaluated.out.splitlines(), evaluated.err
  flags = (f"--workdir={uninterrupted}", "--prompt=document 1", "--max_tokens=12")
  generated = called("generate", *flags)
  assert generated.code == 0 and generated.out.startswith("document 1"), generated.err


def test_the_comparison_can_fail(uninterrupted, tmp_path):
  """Other arrays, and a loss that differs in one digit."""
  last, earlier = (runs.arrays(uninterrupted, step) for step in (STEPS, 25))
  assert not all(np.array_equal(last[name], earlier[name]) for name in last)
  other = shutil.copytree(uninterrupted, tmp_path / "other")
  rows = read_jsonl(other / "metrics.jsonl")
  rows[3]["train/loss"] += 1e-6
  (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  with pytest.raises(AssertionError):
    runs.assert_same_run(uninterrupted, other, STEPS)


@pytest.mark.compat
@pytest.mark.slow
def test_the_fast_step_resumes_bit_for_bit(start, tmp_path):
  fast = ("step.remat=names", "step.scan_unroll=2", "precision.deterministic=True")
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  runs.finish(start(whole, *fast))
  runs.stop_at(start(broken, *fast), 14, signal.SIGKILL)
  output = runs.finish(start(broken, *fast))
  assert f"resuming {broken} from step" in output
  runs.assert_same_run(whole, broken, STEPS)
