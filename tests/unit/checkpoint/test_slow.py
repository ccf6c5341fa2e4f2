"""Saves that take longer than the steps between them."""

import itertools
from types import SimpleNamespace

from checkpoint_helpers import make_state

from ats_jax.checkpoint import CheckpointManager
from ats_jax.checkpoint import manager as manager_module
from ats_jax.config.schema import CheckpointConfig


def test_a_slow_folder_is_said(tmp_path, monkeypatch, caplog):
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(1, make_state(1), {})
    manager.save(2, make_state(2), {})
    assert "before 2" not in caplog.text
    # By this clock every wait is longer than one that is worth a line.
    clock = itertools.count(0.0, 2 * manager_module.LONG_WAIT_SECS)
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    manager.save(3, make_state(3), {})
  line = caplog.records[-1].getMessage()
  assert line.startswith("training waited 20 s") and "before 3 was written" in line
  assert f"{tmp_path} is slow" in line
