"""What of `load_run` takes long without Python: begun before the modules that it needs are imported.

On a machine with a GPU the device needs a second to start, and the files of a checkpoint are hashed
by all cores. Imports take as long, and use one core.
"""

import concurrent.futures
import contextlib
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
    from ats_jax.checkpoint import reader  # here: it imports Orbax, and the devices start meanwhile

    checkpoints = folder / workdir.CHECKPOINTS
    with contextlib.suppress(CheckpointError):
      chosen = reader.find(checkpoints, int(step) if step.isdecimal() else step)
      stack.enter_context(checking(checkpoints / str(chosen)))
    yield
