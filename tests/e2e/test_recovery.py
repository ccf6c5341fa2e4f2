"""What machines do to a run, in real processes: memory that runs out, damaged files, slow data.

Each run loses nothing: its losses over 100 float32 steps are those of an undisturbed one.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from commands import called, forked, started, train_flags
from xla_flags import FAST_STEPS

from ats_jax.checkpoint import committed_steps
from ats_jax.checkpoint.workdir import load_config
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.record import ledger

pytestmark = pytest.mark.thorough

STEPS = 100
LAST = 70  # step of the newest checkpoint when a run is interrupted
SETTINGS = (
  f"num_steps={STEPS}",
  "optimizer.schedule=constant",
  "checkpoint.every_steps=10",
  "checkpoint.keep=4",
  "orchestrator.mode=act",
  "orchestrator.check_interval=5",
  "orchestrator.snapshot_interval=5",
)


@pytest.fixture(scope="module")
def settings(tiny):
  return (*tiny, *SETTINGS)


def train(
  workdir: Path, *settings: str, config: str | Path = "configs/debug.py", **env: str
) -> str:
  """A run to its end; what it logged."""
  flags = train_flags(workdir, *settings, config=config)
  plain = not env and config == "configs/debug.py"
  result = called("train", *flags) if plain else forked("ats_jax.train", *flags, **env)
  assert result.code == 0, result.err
  return result.err


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("undisturbed")
  train(workdir, *settings)
  return runs.losses(workdir)


def flip(folder: Path) -> None:
  """One bit of the largest file."""
  path = max(folder.glob("state/**/*"), key=lambda p: p.stat().st_size)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def truncate(folder: Path) -> None:
  """The end of the largest file."""
  path = max(folder.glob("state/**/*"), key=lambda p: p.stat().st_size)
  os.truncate(path, path.stat().st_size // 2)


def lose_manifest(folder: Path) -> None:
  (folder / "manifest.json").unlink()


def test_damaged_checkpoints_are_passed_over(settings, undisturbed, tmp_path):
  """The newest with a bit flipped, the one before cut, the one before that without a manifest."""
  train(tmp_path, *settings, f"num_steps={LAST}")
  folder = tmp_path / "checkpoints"
  damages = {70: flip, 60: truncate, 50: lose_manifest}
  assert committed_steps(folder) == [40, *sorted(damages)]
  for step, damage in damages.items():
    damage(folder / str(step))
  evaluated = called("evaluate", f"--workdir={tmp_path}")  # changes nothing
  assert evaluated.code == 0, evaluated.err
  assert f"checkpoint 40 of {tmp_path}" in evaluated.err
  log = train(tmp_path, *settings)
  for step, says in {70: "has changed: sha256", 60: "bytes instead of", 50: "is missing"}.items():
    (line,) = [line for line in log.splitlines() if f"checkpoint {step} is damaged" in line]
    assert says in line and "Using 40 instead" in line
  assert f"the damaged one is now {folder}/70.damaged" in log
  assert f"resuming {tmp_path} from step 40 of {STEPS}" in log
  assert runs.losses(tmp_path) == undisturbed


STALL = """
import os
import signal
import threading

import psutil

from ats_jax.orchestrator import hooks
from configs.debug import get_config  # noqa: F401


@hooks.register
def stall(look):
  if 50 <= look.step < 80:
    loaders = psutil.Process().children(recursive=True)
    for loader in loaders:
      os.kill(loader.pid, signal.SIGSTOP)
    wake = lambda: [os.kill(loader.pid, signal.SIGCONT) for loader in loaders]
    threading.Timer(1.0, wake).start()
"""


def test_a_slow_loader_is_named_and_nothing_is_done(settings, undisturbed, tmp_path):
  """Its processes are stopped for a second after each of six looks; one of them says little."""
  config, workdir = tmp_path / "stall.py", tmp_path / "run"
  config.write_text(STALL)
  slow = ("data.num_workers=1", "data.prefetch=1", "checkpoint.every_steps=1000")
  log = train(workdir, *settings, *slow, config=config)
  assert runs.losses(workdir) == undisturbed
  path = workdir / "decisions.jsonl"
  assert ledger.replay(path) == ledger.decisions(path) == []
  checks = [row for row in ledger.read_lines(path) if row["kind"] == "check"]
  waits = {row["reading"]["step"]: row for row in checks}
  stalled = [waits[step] for step in range(55, 80, 5)]  # five of six looks
  first, *_, last = stalled
  assert first["health"]["level"] != "critical" == last["health"]["level"]
  assert any("steps wait for data" in cause for cause in last["health"]["causes"])
  assert any("critical" in x and "steps wait for data" in x for x in log.splitlines())
  reports = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["step"] == last["step"]]
  assert any(row.get("orchestrator/health") == 2 for row in reports)


SHRINK = """
import logging
import os
import resource
import time

import jax

from ats_jax.orchestrator import hooks
from configs.debug import get_config  # noqa: F401

ROOM = 4 * 2**20  # a step needs 34 MB for its time


class GiveBack(logging.Handler):
  def emit(self, record):
    if "the device is out of memory" in record.getMessage():
      resource.setrlimit(resource.RLIMIT_AS, NO_LIMIT)


NO_LIMIT = resource.getrlimit(resource.RLIMIT_AS)
logging.getLogger("absl").addHandler(GiveBack())


@hooks.register
def shrink(look):
  if look.step == 40 and not os.path.exists("{once}"):
    open("{once}", "w").close()
    jax.block_until_ready(jax.live_arrays())
    time.sleep(0.5)  # until what the last step worked with is given back
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(
      resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, NO_LIMIT[1])
    )
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory there is in use")
@pytest.mark.slow
def test_out_of_memory(settings, tmp_path):
  """From step 40 on the machine has no memory for a step; what that worked on was donated."""
  large = (
    *settings,
    "model.vocab_size=16384",  # for 256 tokens: 16 MiB of logits, and of their gradient
    "model.d_model=8",
    "eval.num_batches=1",
    "checkpoint.every_steps=1000",
    "orchestrator.probe_share=1.0",  # read at each look: a snapshot is good once it was
  )
  whole, relieved = tmp_path / "whole", tmp_path / "relieved"
  train(whole, *large, XLA_FLAGS=FAST_STEPS)
  config = tmp_path / "shrink.py"
  config.write_text(SHRINK.replace("{once}", str(tmp_path / "once")))
  # So that what the program frees is free for the machine, not kept for its next step.
  keep_nothing = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
  flags = train_flags(relieved, *large, config=config)
  result = started("ats_jax.train", *flags, XLA_FLAGS=FAST_STEPS, **keep_nothing)
  assert result.code == 0, result.err
  log = result.err
  (line,) = [line for line in log.splitlines() if "the device is out of memory" in line]
  assert "step.accum_steps=2 instead of 1" in line
  assert "RESOURCE_EXHAUSTED: Out of memory allocating" in line
  (resumed,) = [line for line in log.splitlines() if f"resuming {relieved} from step" in line]
  assert int(resumed.split()[-3]) >= 25  # a snapshot that was found good: there is no checkpoint
  assert load_config(relieved).step.accum_steps == 2
  np.testing.assert_allclose(runs.losses(relieved), runs.losses(whole), rtol=1e-5)
  assert len(runs.losses(whole)) == STEPS and runs.losses(relieved) != runs.losses(whole)
  tokens = lambda folder: {row["train/tokens"] for row in runs.rows(folder, "train/tokens")}
  assert tokens(relieved) == tokens(whole)
  assert ledger.decisions(relieved / "decisions.jsonl") == []
