"""Two devices of a process that run a cached program."""

import re

import jobs
import pytest
import runs
from xla_flags import QUICK

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
