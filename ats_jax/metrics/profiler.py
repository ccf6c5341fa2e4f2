"""A profiler trace of a few steps, and which kernels took its time."""

import collections
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
from absl import logging
from jax.profiler import ProfileData

from ats_jax import paths
from ats_jax.paths import Path

NAME_WIDTH = 72  # C++ kernels have names of many lines


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


class Kernel(NamedTuple):
  """All launches of one kernel in a trace.

  Attributes:
    name: a kernel's on a GPU, an instruction's of XLA on a CPU.
    calls: over all devices of this process.
    secs: their sum.
    share: of the time of all kernels.
  """

  name: str
  calls: int
  secs: float
  share: float


def kernel_times(folder: pathlib.Path) -> list[Kernel]:
  """Sum up the newest trace in a folder that `jax.profiler` wrote to; the longest first.

  Raises:
    ValueError: if there is no trace.
  """
  traces = sorted(folder.glob("**/*.xplane.pb"), key=lambda p: p.stat().st_mtime)
  if not traces:
    raise ValueError(f"{folder}: there is no profiler trace (*.xplane.pb). Set log.profile_step.")
  nanoseconds, calls = collections.Counter[str](), collections.Counter[str]()
  for name, duration in _events(ProfileData.from_file(str(traces[-1]))):
    nanoseconds[name] += duration
    calls[name] += 1
  whole = sum(nanoseconds.values()) or 1
  return [Kernel(name, calls[name], ns / 1e9, ns / whole) for name, ns in nanoseconds.most_common()]


def _events(trace: Any) -> Iterator[tuple[str, int]]:
  """Name and nanoseconds of each kernel; without a GPU of each instruction that the CPU ran."""
  lines = [(plane.name, line) for plane in trace.planes for line in plane.lines]
  streams = [line for plane, line in lines if "GPU" in plane and line.name.startswith("Stream")]
  for line in streams or [line for _, line in lines if line.name.startswith("tf_XLA")]:
    for event in line.events:
      bookkeeping = not streams and ("::" in event.name or event.name.startswith("end: "))
      if not bookkeeping:
        yield event.name, int(event.duration_ns)


def kernel_table(kernels: list[Kernel], rows: int = 15) -> str:
  """The first of them as text."""
  lines = [f"{'share':>6} {'ms':>10} {'calls':>7}  kernel"]
  for k in kernels[:rows]:
    lines.append(f"{k.share:6.1%} {1e3 * k.secs:10.2f} {k.calls:7d}  {k.name[:NAME_WIDTH]}")
  left = kernels[rows:]
  if left:
    share, secs = sum(k.share for k in left), sum(k.secs for k in left)
    calls = sum(k.calls for k in left)
    lines.append(f"{share:6.1%} {1e3 * secs:10.2f} {calls:7d}  {len(left)} others")
  return "\n".join(lines)
