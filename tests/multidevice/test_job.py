"""Jobs of two real processes: one dies, all start again; one sees other numbers."""

import os
import re
import signal
from pathlib import Path

import jobs
import numpy as np
import pytest
import runs
from commands import forked, train_flags
from xla_flags import QUICK

from ats_jax.exits import REFUSED
from ats_jax.orchestrator.record import ledger

pytestmark = pytest.mark.thorough

STEPS = 100
SETTINGS = (
  *jobs.TINY,
  f"num_steps={STEPS}",
  "checkpoint.every_steps=20",
  "orchestrator.mode=act",
  "orchestrator.check_interval=10",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  return (*SETTINGS, jobs.text(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
  """The losses of the same run in one process with two devices."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  flags = f"{QUICK} --xla_force_host_platform_device_count=2"
  result = forked("ats_jax.train", *train_flags(workdir, *settings), XLA_FLAGS=flags)
  assert result.code == 0, result.err
  return runs.losses(workdir)


def check(workdir: Path, undisturbed: list[float]) -> None:
  """The run is the undisturbed one, and so is what the ledger says of it."""
  np.testing.assert_allclose(runs.losses(workdir)[:STEPS], undisturbed, rtol=1e-5)
  path = workdir / "decisions.jsonl"
  kinds = [row["kind"] for row in ledger.read_lines(path)]
  assert "resumed_from" in kinds and kinds.count("check") >= STEPS // 10
  assert ledger.replay(path) == ledger.decisions(path) == []


# Of `configs/debug.py`: a model as small as `jobs.TINY` has too few collectives for it.
CACHED = (
  "num_steps=15",  # it came within ten
  "data.tokenizer=bytes",
  "data.validation_fraction=0",
  "data.batch_size=16",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "sample.max_tokens=0",
  "mesh.fsdp=2",
)


def test_devices_of_a_cpu_do_not_wait_for_each_other_in_a_cached_program(tmp_path):
  """The second run of a mesh: jax ended it, as collectives began in another order on each."""
  (tmp_path / "texts").mkdir()
  settings = (*CACHED, jobs.text(tmp_path / "texts"), f"compilation_cache={tmp_path}/cache")
  flags = f"{QUICK} --xla_force_host_platform_device_count=2"
  for name in ("first", "second"):
    output = runs.finish(runs.start(tmp_path / name, *settings, XLA_FLAGS=flags))
  assert re.search(r"[1-9]\d* programs found, 0 added", output), output
  assert runs.losses(tmp_path / "first") == runs.losses(tmp_path / "second")


def test_kill_9_of_one_process(settings, undisturbed, tmp_path):
  job = jobs.launch(tmp_path, 2, *settings)
  runs.read_to(job, 55)
  os.kill(jobs.pid_of(job, 1), signal.SIGKILL)
  output = runs.finish(job)
  assert "launch: process 1 was killed by SIGKILL" in output
  assert "starting all 2 again, from the newest checkpoint: restart 1 of 1" in output
  assert f"resuming {tmp_path} from step" in output
  check(tmp_path, undisturbed)


PLANT = """
import os

from configs.debug import get_config  # noqa: F401
from ats_jax.orchestrator import supervisor

sum_up = supervisor.sum_up


def other(names, last_step, *args):
  reading = sum_up(names, last_step, *args)
  return reading._replace(sound=False) if last_step == 20 else reading


if os.environ["JAX_PROCESS_ID"] == "1":
  supervisor.sum_up = other
"""


def test_a_process_that_sees_another_reading_is_caught_before_it_acts(
  settings, undisturbed, tmp_path
):
  config = tmp_path / "planted.py"
  config.write_text(PLANT)
  workdir = tmp_path / "run"
  job = jobs.launch(workdir, 2, *settings, restarts=0, config=str(config))
  output, _ = job.communicate(timeout=runs.TIMEOUT_SECS)
  assert job.returncode not in (0, REFUSED)
  message = "processes see or decide differently at look 2, of steps 11 to 20; nothing was done"
  assert message in output and "launch: giving up after 0 restarts" in output
  path = workdir / "decisions.jsonl"
  assert [row["kind"] for row in ledger.read_lines(path)] == ["start", "check"]
  np.testing.assert_allclose(runs.losses(workdir), undisturbed[: len(runs.losses(workdir))], 1e-5)
