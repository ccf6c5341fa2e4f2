"""Jobs of two real processes of which one is slow, hangs, freezes, fails or has no memory."""

import os
import re
import signal

import jobs
import pytest
import runs

from ats_jax.exits import REFUSED
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

from ats_jax import run
from configs.debug import get_config  # noqa: F401

to_global, batches = run.to_global, 0


def slow_feed(*args):
  global batches
  batches += 1
  if batches < SLOW_STEPS:
    time.sleep(0.35)
  elif not os.path.exists("ONCE"):
    open("ONCE", "w").close()
    time.sleep(1000)
  return to_global(*args)


if os.environ["JAX_PROCESS_ID"] == "1":
  run.to_global = slow_feed
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
  assert "launch: process " in output and "ended with code 1" in output
  assert "in slow_feed" in (workdir / "stacks.1.txt").read_text()
  assert "in took" in (workdir / "stacks.txt").read_text()  # process 0 waits for the step
  assert len(runs.losses(workdir)) == STEPS


def test_a_frozen_process_ends_all(settings, tmp_path):
  job = jobs.launch(tmp_path, 2, *settings, "num_steps=100000", "hang_secs=300")
  runs.read_to(job, 15)
  os.kill(jobs.pid_of(job, 1), signal.SIGSTOP)
  output = ""
  while "restart 1 of 1" not in output:  # the first start may still print a step or two
    output += runs.read_to(job, 15)
  assert "without a sign of life: process 1 on " in output
  assert "launch: process 0 ended with code 1" in output
  assert "coordination_service" not in output and "Traceback" not in output
  assert "File " in (tmp_path / "stacks.txt").read_text()
  output = runs.stop_at(job, 30, signal.SIGTERM)
  assert "SIGTERM: saved step" in output


FAILS = """
import os

from ats_jax import run
from configs.debug import get_config  # noqa: F401

to_global, batches = run.to_global, 0


def broken_feed(*args):
  global batches
  batches += 1
  if batches == 15:
    raise FAILURE
  return to_global(*args)


if os.environ["JAX_PROCESS_ID"] == "1":
  run.to_global = broken_feed
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


RELIEVED = """
import os

import jax.numpy as jnp

from ats_jax.orchestrator import actions, hooks
from configs.debug import get_config  # noqa: F401


@hooks.register
def look(look):
  if look.step == 10:
    return actions.Rollback()
  if look.step == 30 and os.environ["JAX_PROCESS_ID"] == "1" and not os.path.exists("ONCE"):
    open("ONCE", "w").close()
    jnp.zeros(2**44)  # 64 TiB
"""


def test_a_job_goes_back_in_memory_and_on_with_less(settings, tmp_path):
  """Process 1 has no memory once; before that, all went back to what each had kept of a state."""
  config, workdir = tmp_path / "relieved.py", tmp_path / "run"
  config.write_text(RELIEVED.replace("ONCE", str(tmp_path / "once")))
  acts = (
    "orchestrator.mode=act", "orchestrator.check_interval=5", "orchestrator.snapshot_interval=5",
  )  # fmt: skip
  output = runs.finish(jobs.launch(workdir, 2, *settings, *acts, config=str(config)))
  assert "orchestrator: rolls back to snapshots in host memory" in output
  (decision,) = [
    row for row in ledger.rows(workdir / "decisions.jsonl") if row["kind"] == "decision"
  ]
  assert decision["applied"] and decision["action"] == "Rollback" and decision["to"] < 15, decision
  assert "RESOURCE_EXHAUSTED: Out of memory allocating" in output
  assert "The job goes on with step.accum_steps=2 instead of 1 when it is started" in output
  assert "restart 1 of 1" in output and "memory ran out with less" in output
  assert len(runs.losses(workdir)) == STEPS
