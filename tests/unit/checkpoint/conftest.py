import os
import subprocess
import sys

import pytest
from checkpoint_helpers import make_state
from xla_flags import QUICK

from ats_jax.checkpoint import CheckpointManager
from ats_jax.config.schema import CheckpointConfig


@pytest.fixture
def checkpoints(tmp_path):
  """A folder with the checkpoints 1, 2 and 3 of `make_state`."""
  with CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(keep=5)) as manager:
    for step in (1, 2, 3):
      manager.save(step, make_state(step), {"rows": step * 100})
  return tmp_path / "checkpoints"


@pytest.fixture
def start_child():
  """Return a function that starts a Python process and is sure to end it."""
  children = []

  def start(code: str, *args: object, **env: str) -> subprocess.Popen:
    child = subprocess.Popen(
      [sys.executable, "-c", code, *map(str, args)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK} | env,
    )
    children.append(child)
    return child

  yield start
  for child in children:
    child.kill()
    child.communicate()
