"""A disk that is full: a run says so, and goes on when there is space."""

import subprocess

import pytest
import runs
from commands import started, train_flags

from ats_jax.checkpoint import committed_steps
from ats_jax.exits import REFUSED

pytestmark = pytest.mark.thorough

SETTINGS = (
  "num_steps=8",
  "model.num_layers=1",
  "data.tokenizer=bytes",
  "data.seq_len=32",
  "data.batch_size=8",
  "data.validation_fraction=0.2",
  "checkpoint.every_steps=4",
  "checkpoint.keep=1",
  "eval.every_steps=0",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "log.writers=jsonl",
  "sample.max_tokens=0",
)


def mount(*words: object) -> None:
  done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip(f"this process may not mount: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path):
  """A disk of 2 MiB."""
  folder = tmp_path / "disk"
  folder.mkdir()
  mount("-t", "tmpfs", "-o", "size=2m", "none", folder)
  yield folder
  subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_and_then_larger(disk, tmp_path):
  """There is room for the files of the run, not for a checkpoint."""
  text = tmp_path / "text"
  text.mkdir()
  for i in range(40):
    (text / f"{i}.txt").write_text(f"def f{i}(x): return x + {i}\n" * 5)
  settings = (*SETTINGS, f"data.paths={text}")
  result = started("ats_jax.train", *train_flags(disk / "run", *settings))
  assert result.code == REFUSED
  error = result.last_error()
  assert error.startswith(f"checkpoint 4 was not saved to {disk}/run/checkpoints: ")
  assert "No space left on device" in error and "Free space on the disk" in error
  assert committed_steps(disk / "run" / "checkpoints") == []

  mount("-o", "remount,size=64m", disk)
  result = started("ats_jax.train", *train_flags(disk / "run", *settings))
  assert result.code == 0, result.err
  assert len(runs.losses(disk / "run")) == 8
