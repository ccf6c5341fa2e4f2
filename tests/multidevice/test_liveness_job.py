"""Jobs of two real processes of which one is slow, hangs, freezes, fails or errs."""

import os
import re
import signal

import jobs
import pytest
import runs
from processes import free_port

from ats_jax.exits import LEFT, REFUSED
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.record import ledger

pytestmark = pytest.mark.thorough

ENDLESS = 100_000  # steps
SETTINGS = (*jobs.TINY, "checkpoint.every_steps=50", "heartbeat_secs=5")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  return (*SETTINGS, jobs.text(tmp_path_factory.mktemp("text")))


# Process 1 is slow by its own account, and hangs as soon as it is told so. When the job has been
# started again, nothing is wrong with it. The third time it acts, and then has no memory. The
# fourth time it sees other numbers.
TROUBLES = """
import dataclasses
import os
import threading

import jax.numpy as jnp

from ats_jax.cluster.liveness.watchdog import Watchdog
from ats_jax.orchestrator import actions, hooks
from ats_jax.orchestrator.signals import watch
from ats_jax.train import feed
from configs.debug import get_config as debug

RANK = os.environ["JAX_PROCESS_ID"]
with open(f"FOLDER/starts.{RANK}", "a+") as file:
  file.write("x")
  start = file.tell()
beat, to_global, sum_up = Watchdog._beat, feed.to_global, watch.sum_up
watchdogs, looks = [], 0


def get_config():
  config = debug()
  config.hang_secs = 5.0 if start == 1 else 300.0
  return config


def slow_beat(self, now):
  watchdogs[:] = [self]
  found = beat(self, now)
  return dataclasses.replace(found, host_secs=found.host_secs + 100 * found.step)


def slow_feed(*args, **kwargs):
  if watchdogs and watchdogs[0]._slow:
    threading.Event().wait()
  return to_global(*args, **kwargs)


@hooks.register
def look(look):
  global looks
  looks += 1
  if start == 3 and looks == 1:
    return actions.ChangeSettings((("checkpoint.every_steps", 70),))
  if start == 3 and looks == 4 and RANK == "1":
    jnp.zeros(2**44)  # 64 TiB


def other_reading(*args):
  reading = sum_up(*args)
  return reading._replace(sound=False) if start == 4 and looks == 2 else reading


if RANK == "1":
  watch.sum_up = other_reading
if RANK == "1" and start == 1:
  Watchdog._beat, feed.to_global = slow_beat, slow_feed
"""


def read_until(job, words):
  """Wait until a line has these words; all lines up to it."""
  lines = []
  for line in job.stdout:
    lines.append(line)
    if words in line:
      return "".join(lines)
  raise AssertionError("".join(lines))


def test_a_job_with_one_trouble_after_another(settings, tmp_path):
  """One process is slow, hangs, is frozen, has no memory: all are started again each time.

  Then it sees another reading, which is caught before it acts.
  """
  config, workdir = tmp_path / "troubles.py", tmp_path / "run"
  config.write_text(TROUBLES.replace("FOLDER", str(tmp_path)))
  acts = (
    "orchestrator.mode=act", "orchestrator.check_interval=5", "orchestrator.snapshot_interval=5",
    f"num_steps={ENDLESS}",
  )  # fmt: skip
  job = jobs.launch(workdir, 2, *settings, *acts, config=str(config), restarts=3)

  output = read_until(job, "restart 1 of 3")
  assert output.count("is slow: its own part of a step takes 100 s") >= 1
  assert set(re.findall(r"(process \d) on \S+ is slow", output)) == {"process 1"}
  rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if "hosts/slowest" in row]
  assert {row["hosts/slowest"] for row in rows} == {1}
  assert rows[0]["hosts/slowest_ratio"] > 1.5
  assert "; behind: process 1 on " in output and "(data_wait), unmoved for" in output
  # Which of the two sees it first: the one that hangs, or the one that waits for it.
  assert re.search(r"launch: process \d ended with code 1 ", output)
  assert "in slow_feed" in (workdir / "stacks.1.txt").read_text()
  assert "in finish_update" in (workdir / "stacks.txt").read_text()  # process 0 waits for the step

  read_until(job, f"resuming {workdir} from step")
  runs.read_to(job, 1)
  os.kill(jobs.pid_of(job, 1), signal.SIGSTOP)
  output = read_until(job, "restart 2 of 3")
  assert "without a sign of life: process 1 on " in output
  assert f"launch: process 0 ended with code {LEFT}" in output
  assert "coordination_service" not in output and "Traceback" not in output
  assert "File " in (workdir / "stacks.txt").read_text()

  output = read_until(job, "restart 3 of 3")
  assert "orchestrator: other settings from step" in output
  assert "RESOURCE_EXHAUSTED: Out of memory allocating" in output
  assert "The job goes on with step.accum_steps=2 instead of 1 when it is started" in output

  read_until(job, "memory ran out with less")
  output, _ = job.communicate(timeout=runs.TIMEOUT_SECS)
  assert job.returncode not in (0, REFUSED)
  assert "processes see or decide differently at look " in output and "nothing was done" in output
  assert "launch: giving up after 3 restarts" in output
  (done,) = (
    row for row in ledger.read_lines(workdir / "decisions.jsonl") if row["kind"] == "decision"
  )
  assert done["applied"] and done["action"] == "ChangeSettings"


def test_without_a_launcher_the_other_ends_in_a_line(settings, tmp_path):
  address = f"localhost:{free_port()}"
  job = [
    runs.start(
      tmp_path, *settings, f"num_steps={ENDLESS}", JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(rank),
    )
    for rank in (0, 1)
  ]  # fmt: skip
  runs.read_to(job[0], 15)
  job[0].kill()
  output, _ = job[1].communicate(timeout=runs.TIMEOUT_SECS)
  job[0].communicate()
  # The coordination service of process 0 ends the others by an abort.
  assert job[1].returncode in (LEFT, -signal.SIGABRT)
  assert "Traceback" not in output and "coordination_service" not in output
  after = [line for line in output.splitlines() if not line.startswith("step ")]
  assert len(after) < 10, output


FAILS = """
import os

from ats_jax.train import feed
from configs.debug import get_config  # noqa: F401

to_global, batches = feed.to_global, 0


def broken_feed(*args, **kwargs):
  global batches
  batches += 1
  if batches == 15:
    raise ValueError("these rows are wrong")
  return to_global(*args, **kwargs)


if os.environ["JAX_PROCESS_ID"] == "1":
  feed.to_global = broken_feed
"""


def test_one_that_fails_is_named_and_the_others_end(settings, tmp_path):
  config, workdir = tmp_path / "fails.py", tmp_path / "run"
  config.write_text(FAILS)
  # What waits for signs of life would wait longer than this test.
  long = f"heartbeat_secs={2 * runs.TIMEOUT_SECS}"
  job = jobs.launch(
    workdir, 2, *settings, f"num_steps={ENDLESS}", long, config=str(config), restarts=0
  )
  output, _ = job.communicate(timeout=runs.TIMEOUT_SECS)
  assert job.returncode == REFUSED, output
  assert "error: these rows are wrong" in output
  assert f"launch: process 1 ended with code {REFUSED}" in output
  assert "coordination_service" not in output
