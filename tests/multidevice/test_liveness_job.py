"""Jobs of two real processes of which one is slow, hangs, freezes, fails or has no memory."""

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

SLOW_STEPS = 45
STEPS = 60
SETTINGS = (*jobs.TINY, f"num_steps={STEPS}", "checkpoint.every_steps=10", "hang_secs=5")
SETTINGS += ("heartbeat_secs=5",)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  return (*SETTINGS, jobs.text(tmp_path_factory.mktemp("text")))


SLOW = """
import os
import time

from ats_jax.train import feed
from configs.debug import get_config  # noqa: F401

to_global, batches = feed.to_global, 0


def slow_feed(*args, **kwargs):
  global batches
  batches += 1
  if batches < SLOW_STEPS:
    time.sleep(0.35)
  elif not os.path.exists("ONCE"):
    open("ONCE", "w").close()
    time.sleep(1000)
  return to_global(*args, **kwargs)


if os.environ["JAX_PROCESS_ID"] == "1":
  feed.to_global = slow_feed
"""


def test_a_slow_process_is_named_and_one_that_hangs_ends_all(settings, tmp_path):
  config, workdir = tmp_path / "slow.py", tmp_path / "run"
  slow = SLOW.replace("SLOW_STEPS", str(SLOW_STEPS)).replace("ONCE", str(tmp_path / "once"))
  config.write_text(slow)
  output = runs.finish(jobs.launch(workdir, 2, *settings, config=str(config)))
  assert output.count("is slow: its own part of a step takes 0.3") >= 1
  assert set(re.findall(r"(process \d) on \S+ is slow", output)) == {"process 1"}
  rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if "hosts/slowest" in row]
  assert {row["hosts/slowest"] for row in rows[:20]} == {1}
  assert rows[0]["hosts/slowest_ratio"] > 1.5
  assert "; behind: process 1 on " in output and "(data_wait), unmoved for" in output
  # Which of the two sees it first: the one that hangs, or the one that waits for it.
  assert re.search(r"launch: process \d ended with code 1 ", output)
  assert "in slow_feed" in (workdir / "stacks.1.txt").read_text()
  assert "in finish_update" in (workdir / "stacks.txt").read_text()  # process 0 waits for the step
  assert len(runs.losses(workdir)) == STEPS


def test_a_frozen_process_ends_all(settings, tmp_path):
  job = jobs.launch(tmp_path, 2, *settings, "num_steps=100000", "hang_secs=300")
  runs.read_to(job, 15)
  os.kill(jobs.pid_of(job, 1), signal.SIGSTOP)
  output = ""
  while "restart 1 of 1" not in output:  # the first start may still print a step or two
    output += runs.read_to(job, 15)
  assert "without a sign of life: process 1 on " in output
  assert f"launch: process 0 ended with code {LEFT}" in output
  assert "coordination_service" not in output and "Traceback" not in output
  assert "File " in (tmp_path / "stacks.txt").read_text()
  output = runs.stop_at(job, 30, signal.SIGTERM)
  assert "SIGTERM: saved step" in output


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_without_a_launcher_the_other_ends_soon_and_in_a_line(dead, settings, tmp_path):
  address = f"localhost:{free_port()}"
  job = [
    runs.start(
      tmp_path, *settings, "num_steps=100000", JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(rank),
    )
    for rank in (0, 1)
  ]  # fmt: skip
  runs.read_to(job[0], 15)
  job[dead].kill()
  output, _ = job[1 - dead].communicate(timeout=30)
  job[dead].communicate()
  # Of process 0, the coordination service ends the others by an abort.
  assert job[1 - dead].returncode == LEFT or (dead == 0 and job[1].returncode == -signal.SIGABRT)
  assert "Traceback" not in output and "coordination_service" not in output
  after = [line for line in output.splitlines() if not line.startswith("step ")]
  assert len(after) < 10 or dead == 1, output


FAILS = """
import os

from ats_jax.train import feed
from configs.debug import get_config  # noqa: F401

to_global, batches = feed.to_global, 0


def broken_feed(*args, **kwargs):
  global batches
  batches += 1
  if batches == 15:
    raise FAILURE
  return to_global(*args, **kwargs)


if os.environ["JAX_PROCESS_ID"] == "1":
  feed.to_global = broken_feed
"""


@pytest.mark.parametrize(
  ("failure", "code", "says"),
  [
    ("ValueError('these rows are wrong')", REFUSED, "error: these rows are wrong"),
    ("KeyError('a bug')", 1, "KeyError: 'a bug'"),
  ],
)
def test_one_that_fails_is_named_and_the_others_end_soon(failure, code, says, settings, tmp_path):
  config, workdir = tmp_path / "fails.py", tmp_path / "run"
  config.write_text(FAILS.replace("FAILURE", failure))
  long = "heartbeat_secs=30"  # nobody waits for that
  job = jobs.launch(workdir, 2, *settings, long, config=str(config), restarts=0)
  output, _ = job.communicate(timeout=runs.TIMEOUT_SECS)
  assert job.returncode == code, output
  assert says in output and f"launch: process 1 ended with code {code}" in output
  assert "coordination_service" not in output


ACTS = """
import os

import jax.numpy as jnp

from ats_jax.orchestrator import actions, hooks
from configs.debug import get_config  # noqa: F401


@hooks.register
def look(look):
  if look.step == 10:
    return actions.ACTION
  if look.step >= 30 and os.environ["JAX_PROCESS_ID"] == "1" and not os.path.exists("ONCE"):
    open("ONCE", "w").close()
    jnp.zeros(2**44)  # 64 TiB
"""


@pytest.mark.parametrize(
  ("action", "says"),
  [
    pytest.param(
      "Rollback()", "orchestrator: rolls back to snapshots in host memory", marks=pytest.mark.slow
    ),
    ("ChangeSettings((('checkpoint.every_steps', 7),))", "orchestrator: other settings from step"),
  ],
)
def test_a_job_acts_and_goes_on_when_one_process_has_no_memory(action, says, settings, tmp_path):
  """All go back to what each has kept of a state, or on with other settings; then memory ends."""
  config, workdir = tmp_path / "acts.py", tmp_path / "run"
  config.write_text(ACTS.replace("ONCE", str(tmp_path / "once")).replace("ACTION", action))
  acts = (
    "orchestrator.mode=act", "orchestrator.check_interval=5", "orchestrator.snapshot_interval=5",
  )  # fmt: skip
  output = runs.finish(jobs.launch(workdir, 2, *settings, *acts, config=str(config)))
  (done,) = (
    row for row in ledger.read_lines(workdir / "decisions.jsonl") if row["kind"] == "decision"
  )
  assert done["applied"] and action.startswith(done["action"]) and says in output
  assert "RESOURCE_EXHAUSTED: Out of memory allocating" in output
  assert "The job goes on with step.accum_steps=2 instead of 1 when it is started" in output
  assert "restart 1 of 1" in output and "memory ran out with less" in output
  assert len(runs.losses(workdir)) == STEPS
