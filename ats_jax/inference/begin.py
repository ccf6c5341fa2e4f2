"""What of loading a run needs little Python, begun while Python imports the modules for the rest.

A GPU takes about a second to start, and the files of a checkpoint are hashed by all cores; imports
take as long, and use one core.
"""

import concurrent.futures
import contextlib
import gc
import importlib
from collections.abc import Iterator

import jax

from ats_jax.checkpoint import workdir
from ats_jax.checkpoint.integrity import CheckpointError, checking
from ats_jax.cluster import runtime
from ats_jax.store.paths import Path


@contextlib.contextmanager
def begun(folder: Path, step: str) -> Iterator[None]:
  """Start the devices and hash a checkpoint in threads, for a `load_run` in the block.

  What goes wrong in the threads goes wrong in `load_run` again, which says it.

  Args:
    folder: the workdir.
    step: a step, "latest" or "best".

  Raises:
    ValueError: if there is no run, or its config cannot be read.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(runtime.variables(workdir.load_config(folder)))
    devices = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, "devices"))
    devices.submit(jax.devices)
    with _without_collection():
      from ats_jax.checkpoint import reader  # here: it imports Orbax; the devices start meanwhile

      checkpoints = folder / workdir.CHECKPOINTS
      with contextlib.suppress(CheckpointError):
        chosen = reader.find(checkpoints, int(step) if step.isdecimal() else step)
        stack.enter_context(checking(checkpoints / str(chosen)))
      importlib.import_module("ats_jax.inference.load")
    yield


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
  """Keep Python from searching what modules make for garbage, now and in later collections."""
  gc.disable()
  try:
    yield
    gc.freeze()
  finally:
    gc.enable()
