"""Saves that take longer than the steps between them."""

import time

from checkpoint_helpers import make_state

from ats_jax.checkpoint import CheckpointManager
from ats_jax.checkpoint import manager as manager_module
from ats_jax.config.schema import CheckpointConfig
from ats_jax.store import paths


def test_a_slow_folder_is_said(tmp_path, monkeypatch, caplog):
  commit = paths.commit_folder

  def slow(*args):
    time.sleep(2.0)
    commit(*args)

  monkeypatch.setattr(manager_module, "LONG_WAIT_SECS", 1.0)
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(1, make_state(1), {})
    manager.wait()
    manager.save(2, make_state(2), {})
    assert "before 2" not in caplog.text
    monkeypatch.setattr(paths, "commit_folder", slow)
    manager.save(3, make_state(3), {})
    manager.save(4, make_state(4), {})
  line = caplog.records[-1].getMessage()
  assert line.startswith("training waited ") and f"before 4 was written: {tmp_path} is slow" in line
