"""A profiler trace of a few steps."""

import contextlib
import pathlib
from typing import Any, Self

import jax
from absl import logging

from ats_jax import paths
from ats_jax.metrics.kernels import kernel_table, kernel_times
from ats_jax.paths import Path


class ProfileWindow:
  """Traces steps `first_step` to `first_step + num_steps - 1`; view with TensorBoard or XProf.

  ```
  with ProfileWindow(cfg.log.profile_step, 3, workdir / "profile") as profile:
    for step in ...:
      profile.before(step, state)
      state = train_step(state, batch)
  ```
  """

  def __init__(self, first_step: int, num_steps: int, directory: Path):
    """Plans the window.

    Args:
      first_step: 0 = no trace. A run resumed past this step makes none either.
      num_steps: at least 1.
      directory: where the trace goes.

    Raises:
      ValueError: a negative first step or no steps.
    """
    if first_step < 0 or num_steps < 1:
      raise ValueError(
        f"profile window of {num_steps} steps from step {first_step}: expected at least one step, "
        "from step 1 or later (0 = none)"
      )
    self._first, self._last = first_step, first_step + num_steps
    self._directory = directory
    self._local: Path | None = None  # where a running trace goes
    self._filled = contextlib.ExitStack()

  def before(self, step: int, state: Any = None) -> None:
    """Starts or stops the trace if it is time; call it ahead of every step.

    Args:
      step: the step about to run.
      state: what the step before it produced. It is waited for at the two edges of the window, so
        that the trace holds the device work of the chosen steps and no other.
    """
    if self._first and step == self._first:
      jax.block_until_ready(state)
      self._local = self._filled.enter_context(paths.filled(self._directory))
      jax.profiler.start_trace(str(self._local))
    elif self._local is not None and step >= self._last:
      jax.block_until_ready(state)
      self.close()

  def close(self) -> None:
    """Ends a running trace and writes it."""
    if self._local is not None:
      local, self._local = self._local, None
      jax.profiler.stop_trace()
      table = kernel_table(kernel_times(pathlib.Path(local)))
      self._filled.close()
      logging.info("profiler trace of steps from %d: %s\n%s", self._first, self._directory, table)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()
