"""The comparison of optimizers: rates are chosen by short runs, and processes share a folder."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, TIMEOUT_SECS, started
from xla_flags import QUICK

TRACK = "lab.optimizer_track"
TINY = {
  "model.num_layers": 1, "model.d_model": 32, "model.d_ff": 64, "data.tokenizer": "bytes",
  "data.seq_len": 16, "data.batch_size": 4, "data.validation_fraction": 0.2, "eval.num_batches": 2,
  "eval.bigram_baseline": "false",
}  # fmt: skip


def write_row(folder, optimizer, rate, seed, steps, losses):
  """As a run that has ended leaves it."""
  path = folder / f"{optimizer}-{rate:g}-{seed}-{steps}" / "row.json"
  path.parent.mkdir()
  fields = {"optimizer": optimizer, "rate": rate, "seed": seed, "losses": losses}
  path.write_text(json.dumps(fields | {"step_secs": 0.5, "peak_gib": 1.0, "wait_share": 0.0}))


def test_rates_targets_and_pairs(tmp_path):
  """The best rate lies beyond those given; a run that diverged is not the best."""
  for rate, loss in {1e-3: 3.0, 2e-3: 2.0, 4e-3: 1.5, 8e-3: float("nan")}.items():
    write_row(tmp_path, "adamw", rate, 0, 2, {2: loss})
  write_row(tmp_path, "lion", 1e-4, 0, 2, {2: 2.0})
  write_row(tmp_path, "lion", 2e-4, 0, 2, {2: 1.9})
  write_row(tmp_path, "lion", 4e-4, 0, 2, {2: 1.95})
  for seed, lasts in enumerate(((1.0, 1.02), (1.2, 1.2))):
    for (optimizer, rate), last in zip((("adamw", 4e-3), ("lion", 2e-4)), lasts, strict=True):
      write_row(tmp_path, optimizer, rate, seed, 10, {5: last + 0.05, 10: last})
  rates = "--rates=adamw=1e-3,adamw=2e-3,lion=1e-4,lion=2e-4"
  lengths = ["--steps=10", "--tune_steps=2", "--seeds=2"]
  out = started(TRACK, f"--out={tmp_path}", rates, *lengths, "--table").out
  assert "adamw at 0.008: nan after 2 steps" in out and "target 1.1000" in out
  assert "| adamw | 0.004 | 1.1000 | 1 of 2 |" in out
  assert "| lion | 0.0002 | 1.1100 | 1 of 2 |" in out
  assert "| lion | +1.000 | 1.000 | 2 |" in out


@pytest.mark.thorough
def test_two_processes_share_the_runs_of_a_folder(tmp_path):
  """Each run is trained once, the rate is chosen by all, and both print the same."""
  (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
  settings = TINY | {"data.paths": tmp_path / "text.txt"}
  command = [
    sys.executable, "-m", TRACK, f"--out={tmp_path / 'out'}", "--config=configs/debug.py",
    "--rates=adamw=1e-3", "--steps=4", "--tune_steps=2",
    "--every=2", "--seeds=1", *(f"--set={name}={value}" for name, value in settings.items()),
  ]  # fmt: skip
  with contextlib.ExitStack() as stack:
    logs = [stack.enter_context((tmp_path / f"log.{i}").open("w")) for i in range(2)]
    env = {**os.environ, "XLA_FLAGS": QUICK}  # four rows are for one device
    start = lambda log: subprocess.Popen(command, stdout=log, stderr=log, cwd=REPOSITORY, env=env)
    processes = [stack.enter_context(start(log)) for log in logs]
    try:
      codes = [process.wait(TIMEOUT_SECS) for process in processes]
    finally:
      for process in processes:
        process.kill()
  texts = [Path(log.name).read_text() for log in logs]
  assert codes == [0, 0], texts
  tables = [text[text.index("adamw at ") :] for text in texts]
  assert tables[0] == tables[1]
  found = re.findall(r"adamw at (\S+): (\S+) after 2 steps", tables[0])
  short = {float(rate): float(loss) for rate, loss in found}
  assert len(short) == 3 and f"| adamw | {min(short, key=short.__getitem__):g} |" in tables[0]
  runs = [path.parent for path in (tmp_path / "out").glob("*/row.json")]
  assert len(runs) == len(short) + 1
  for run in runs:  # a run that was trained twice would have begun twice
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == sorted(set(steps)) and steps
