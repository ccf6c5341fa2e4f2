"""Two processes that see other numbers; two devices of a process that run a cached program."""

import re

import jobs
import pytest
import runs
from xla_flags import QUICK

from ats_jax.exits import REFUSED
from ats_jax.orchestrator.record import ledger

pytestmark = pytest.mark.thorough

STEPS = 30
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


@pytest.mark.slow
def test_devices_of_a_cpu_do_not_wait_for_each_other_in_a_cached_program(tmp_path):
  """The second run of a mesh: jax ended it, as collectives began in another order on each."""
  (tmp_path / "texts").mkdir()
  settings = (*CACHED, jobs.text(tmp_path / "texts"), f"compilation_cache={tmp_path}/cache")
  flags = f"{QUICK} --xla_force_host_platform_device_count=2"
  for name in ("first", "second"):
    output = runs.finish(runs.start(tmp_path / name, *settings, XLA_FLAGS=flags))
  assert re.search(r"[1-9]\d* programs found, 0 added", output), output
  assert runs.losses(tmp_path / "first") == runs.losses(tmp_path / "second")


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


def test_a_process_that_sees_another_reading_is_caught_before_it_acts(settings, tmp_path):
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
