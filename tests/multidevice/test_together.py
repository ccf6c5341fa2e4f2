"""Two processes of a job that see two folders, see one late, or have two clocks."""

import pytest
from processes import run_job

from ats_jax.store.shared_folder import CLOCK_SECS, skew

PROCESS = """
import logging, time
from absl import logging as absl_logging
from helpers import tiny_config
from ats_jax.store import shared_folder
from ats_jax.checkpoint import workdir
from ats_jax.store.paths import Path

folder, slow = map(Path, argv)
shared_folder.SHARED_SECS, shared_folder.SLOW_SECS = 3, 0.2

class Say(logging.Handler):
  def emit(self, record):
    say("logged:", record.getMessage())

absl_logging.get_absl_logger().addHandler(Say())

def claim(folder):
  try:
    with workdir.claim(folder, tiny_config()) as run:
      say("claimed")
  except ValueError as error:
    say(str(error).replace(chr(10), "|"))

claim(folder)
if rank:  # a folder that shows late what process 0 has written
  read, late = shared_folder._read, time.monotonic() + 1
  shared_folder._read = lambda path: read(path) if time.monotonic() > late else ""
claim(slow)
if rank:
  shared_folder._read = read
  now = time.time
  time.time = lambda: now() + 100  # another clock
claim(folder)
claim(folder / str(rank))  # not shared
"""


def test_what_each_is_told(tmp_path):
  lines = run_job(PROCESS, tmp_path, tmp_path / "run", tmp_path / "slow")
  for rank, said in enumerate(lines):
    assert said[0] == "claimed"
    rest = said[1:]
    if rank:
      assert rest.pop(0).startswith("logged: waiting to see what process 0 wrote to ")
    assert rest.pop(0) == "claimed"
    assert rest.pop(0).startswith("logged: the clock of process 1 is 100 s ahead of process 0's")
    assert rest.pop(0) == "claimed"
    head, line, advice = rest[-1].split("|")
    assert head == "what process 0 writes to the workdir is not seen by others:"
    assert "process 1 on " in line and f": {tmp_path}/run/1/run_id is not there after 3 s" in line
    assert advice.endswith("need a --workdir on a file system that they share.")


@pytest.mark.parametrize(
  ("times", "found"),
  [
    ([10.0, 10.0 + CLOCK_SECS], {}),
    ([10.0, 17.0, 10.5, 3.0], {1: 7.0, 3: -7.0}),
  ],
)
def test_how_far_clocks_are_ahead(times, found):
  assert skew(times) == found
