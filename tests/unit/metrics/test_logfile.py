"""The log of a run in its workdir: what is in it, where it goes on, and how much of it there is."""

import logging as std_logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import logging
from commands import REPOSITORY, forked, train_flags

from ats_jax.config.schema import LogConfig
from ats_jax.metrics import logfile

SMALL = ("model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.num_kv_heads=1")
SHORT = ("data.seq_len=32", "data.batch_size=2", "optimizer.warmup_steps=0", "eval.every_steps=0")
SHORT += ("data.tokenizer=bytes", "sample.max_tokens=0", "checkpoint.every_steps=2")


def trained(workdir, *settings):
  """What a run shows."""
  result = forked("ats_jax.train", *train_flags(workdir, *settings))
  assert result.code == 0, result.err
  return result.out + result.err


@pytest.mark.thorough
def test_a_run_keeps_its_log_and_appends_when_it_goes_on(tmp_path):
  (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 50)
  own = f"data.paths={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache"
  settings = (*SMALL, *SHORT, *own, "data.validation_fraction=0", "orchestrator.mode=off")
  run, log = tmp_path / "run", tmp_path / "run" / "log.txt"
  shown = trained(run, *settings, "num_steps=3", "log.level=warning", "log.writers=jsonl")
  kept = log.read_text()
  assert "parameters:" not in shown and "orbax" not in shown
  assert all(" WARNING " in line for line in kept.splitlines()), kept
  shown = trained(run, *settings, "num_steps=4", "log.level=debug")
  assert log.read_text().startswith(kept)
  added = log.read_text()[len(kept) :]
  for words in ("parameters:", "peak of a device: none is known of 'cpu'", "from step 3 of 4"):
    assert words in added and words in shown
  assert "Finished save" in added  # a line of Orbax's
  line = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    mesh: stage=1, data=")
  assert len([x for x in added.splitlines() if line.match(x)]) == 1


def test_the_error_that_ends_a_run_is_the_last_line(tmp_path):
  with pytest.raises(ValueError, match="no good"), logfile.log_to_file(tmp_path, 0):
    logging.warning("before")
    raise ValueError("no good")
  *_, before, last = (tmp_path / "log.txt").read_text().splitlines()
  assert before.endswith("WARNING before")
  assert last.endswith("ERROR   the run ended: ValueError: no good")


def test_each_process_has_its_own_and_a_torn_line_is_ended(tmp_path):
  (tmp_path / "log.2.txt").write_bytes(b"torn")
  before = list(std_logging.root.handlers)
  with logfile.log_to_file(tmp_path, 2):
    logging.error("after")
  assert std_logging.root.handlers == before
  torn, after = (tmp_path / "log.2.txt").read_text().splitlines()
  assert torn == "torn" and after.endswith("after")


def test_a_log_that_cannot_be_opened_leaves_nothing_to_close_at_the_exit(tmp_path):
  (tmp_path / "log.txt").mkdir()
  handlers = lambda: [made() for made in std_logging._handlerList]
  before = handlers()
  with pytest.raises(IsADirectoryError) as raised, logfile.log_to_file(tmp_path, 0):
    pass
  assert handlers() == before and raised.tb  # which holds what was made until here


@pytest.mark.parametrize("level", [std_logging.NOTSET, std_logging.WARNING])
def test_the_level_is_as_it_was_afterwards(monkeypatch, level):
  logger = logging.get_absl_logger()
  monkeypatch.setattr(logger, "level", level)  # NOTSET: in a process that has set none so far
  before = logging.get_verbosity()
  with logfile.verbosity(LogConfig(level="debug")):
    assert logging.get_verbosity() == logging.DEBUG
  assert logging.get_verbosity() == before and logger.level == level


FULL = """
import resource, sys
from pathlib import Path
from absl import logging
from ats_jax.metrics import logfile
with logfile.log_to_file(Path(sys.argv[1]), 0):
  logging.error("one")
  resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
  logging.error("two " * 99)
print("went on")
"""


def test_a_full_disk_under_the_log_is_no_end(tmp_path):
  command = [sys.executable, "-c", FULL, str(tmp_path)]
  result = subprocess.run(
    command, check=False, capture_output=True, text=True, timeout=120, cwd=Path(REPOSITORY)
  )
  assert "went on" in result.stdout and "File too large" in result.stderr
