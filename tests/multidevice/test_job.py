"""Jobs of two real processes: one dies or freezes, all start again; one sees other numbers."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import runs
from commands import forked, train_flags

from ats_jax.exits import REFUSED, STOPPED
from ats_jax.orchestrator.record import ledger

pytestmark = pytest.mark.thorough

STEPS = 100
QUICK = "--xla_backend_optimization_level=0"
SETTINGS = (
  f"num_steps={STEPS}",
  "model.num_layers=1",
  "model.d_model=32",
  "model.num_heads=2",
  "model.num_kv_heads=2",
  "model.d_ff=32",
  "data.validation_fraction=0.2",
  "data.tokenizer=bytes",
  "data.seq_len=32",
  "data.batch_size=8",
  "optimizer.warmup_steps=5",
  "optimizer.schedule=constant",
  "checkpoint.every_steps=20",
  "eval.every_steps=0",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "log.writers=console,jsonl",
  "sample.max_tokens=0",
  "heartbeat_secs=10",
  "orchestrator.mode=act",
  "orchestrator.check_interval=10",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
  for i in range(40):
    (folder / f"{i}.txt").write_text(" ".join(draw.choices(("def", "self", "in", "x"), k=60 + i)))
  return (*SETTINGS, f"data.paths={folder}")


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
  """The losses of the same run in one process with two devices."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  flags = f"{QUICK} --xla_force_host_platform_device_count=2"
  result = forked("ats_jax.train", *train_flags(workdir, *settings), XLA_FLAGS=flags)
  assert result.code == 0, result.err
  return runs.losses(workdir)


def launch(workdir: Path, *settings: str, restarts: int = 1, config: str = "configs/debug.py"):
  flags = ("--processes=2", f"--restarts={restarts}")
  return runs.start(workdir, *settings, config=config, launch=flags, XLA_FLAGS=QUICK)


def pid_of(job, rank: int) -> int:
  (found,) = (
    child.pid
    for child in psutil.Process(job.pid).children()
    if child.environ()["JAX_PROCESS_ID"] == str(rank)
  )
  return found


def check(workdir: Path, undisturbed: list[float]) -> None:
  """The run is the undisturbed one, and so is what the ledger says of it."""
  np.testing.assert_allclose(runs.losses(workdir)[:STEPS], undisturbed, rtol=1e-5)
  path = workdir / "decisions.jsonl"
  kinds = [row["kind"] for row in ledger.rows(path)]
  assert "resumed_from" in kinds and kinds.count("check") >= STEPS // 10
  assert ledger.replay(path) == ledger.decisions(path) == []


def test_kill_9_of_one_process(settings, undisturbed, tmp_path):
  job = launch(tmp_path, *settings)
  runs.read_to(job, 55)
  os.kill(pid_of(job, 1), signal.SIGKILL)
  output = runs.finish(job)
  assert "launch: process 1 was killed by SIGKILL" in output
  assert "starting all 2 again, from the newest checkpoint: restart 1 of 1" in output
  assert f"resuming {tmp_path} from step" in output
  check(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_process_that_freezes_and_a_signal_to_the_job(settings, undisturbed, tmp_path):
  """The heartbeat of the frozen one fails, which ends the other; later SIGTERM saves and ends."""
  job = launch(tmp_path, *settings, "num_steps=100000")
  runs.read_to(job, 55)
  os.kill(pid_of(job, 1), signal.SIGSTOP)
  output = ""
  while "restart 1 of 1" not in output:  # the first start may still print a step or two
    output += runs.read_to(job, 55)
  assert "launch: process 0 was killed by SIGABRT" in output
  output = runs.stop_at(job, STEPS, signal.SIGTERM)
  assert job.returncode == STOPPED and "SIGTERM: saved step" in output
  check(tmp_path, undisturbed)


PLANT = """
import os

from configs.debug import get_config  # noqa: F401
from ats_jax.orchestrator import supervisor

read = supervisor.read


def other(names, last_step, *args):
  reading = read(names, last_step, *args)
  return reading._replace(sound=False) if last_step == 20 else reading


if os.environ["JAX_PROCESS_ID"] == "1":
  supervisor.read = other
"""


def test_a_process_that_sees_another_reading_is_caught_before_it_acts(
  settings, undisturbed, tmp_path
):
  config = tmp_path / "planted.py"
  config.write_text(PLANT)
  workdir = tmp_path / "run"
  job = launch(workdir, *settings, restarts=0, config=str(config))
  output, _ = job.communicate(timeout=runs.TIMEOUT_SECS)
  assert job.returncode not in (0, REFUSED)
  message = "processes see or decide differently at look 2, of steps 11 to 20; nothing was done"
  assert message in output and "launch: giving up after 0 restarts" in output
  path = workdir / "decisions.jsonl"
  assert [row["kind"] for row in ledger.rows(path)] == ["start", "check"]
  np.testing.assert_allclose(runs.losses(workdir), undisturbed[: len(runs.losses(workdir))], 1e-5)
