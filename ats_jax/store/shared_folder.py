"""Processes of a job: do they see one folder, by one clock? And what they tell each other."""

import platform
import time

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from ats_jax.store import paths
from ats_jax.store.paths import Path

SHARED_SECS = 120.0  # that a process waits to see what process 0 has written
SLOW_SECS = 5.0  # after which it warns that it waits
CLOCK_SECS = 5.0  # between the clocks of two machines, for a warning


def check_folder(path: Path, content: str) -> None:
  """Check that all processes see what process 0 has written; all call this together.

  Args:
    path: the file.
    content: text that the file must have.

  Raises:
    ValueError: on all of them, if one does not see it within SHARED_SECS.
  """
  if jax.process_count() == 1:
    return
  blind = [line for line in gather(_wait_for(path, content)) if line]
  if blind:
    lines = "\n".join(f"  {line}" for line in blind)
    raise ValueError(
      f"what process 0 writes to the workdir is not seen by others:\n{lines}\n"
      "All processes of a job need a --workdir on a file system that they share."
    )


def _wait_for(path: Path, content: str) -> str:
  """Wait until a file has that content; what is there instead after SHARED_SECS, or ""."""
  start, warned = time.monotonic(), False
  while (content_there := _read(path)) != content:
    waited = time.monotonic() - start
    if waited > SHARED_SECS:
      here = f"process {jax.process_index()} on {platform.node()}: {path}"
      return (
        f"{here} {'has other content' if content_there else 'is not there'} after {waited:.0f} s"
      )
    if waited > SLOW_SECS and not warned:
      warned = True
      logging.warning("waiting to see what process 0 wrote to %s: the shared folder is slow", path)
    time.sleep(0.05)
  return ""


def check_clocks() -> None:
  """Say if this machine's clock differs from process 0's; all processes call this together."""
  if jax.process_count() == 1:
    return
  multihost_utils.sync_global_devices("clocks")  # so that all look at about the same moment
  ahead = skew([float(text) for text in gather(repr(time.time()))])
  for rank, seconds in ahead.items():
    logging.warning(
      "the clock of process %d is %.0f s %s of process 0's: times in their logs do not fit. "
      "Set the clocks of the machines (chrony, ntpd); the run does not depend on them.",
      rank,
      abs(seconds),
      "ahead" if seconds > 0 else "behind",
    )


def skew(times: list[float]) -> dict[int, float]:
  """Seconds by which clocks are ahead of the first one, where it is much."""
  ahead = {rank: now - times[0] for rank, now in enumerate(times)}
  return {rank: seconds for rank, seconds in ahead.items() if abs(seconds) > CLOCK_SECS}


def gather(text: str) -> list[str]:
  """A text of each process, in their order, on all of them; all call this together."""
  if jax.process_count() == 1:
    return [text]
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(data.size)).reshape(-1)
  padded = np.zeros(sizes.max(), np.uint8)
  padded[: data.size] = data
  rows = multihost_utils.process_allgather(padded)
  return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def from_one(source: int, data: np.ndarray | None, size: int) -> np.ndarray:
  """Bytes of one process, on all of them; all call this together.

  Args:
    source: number of the process that sends.
    data: bytes [size], on that one.
    size: number of bytes.
  """
  own = np.zeros(size, np.uint8) if data is None else np.asarray(data)
  is_source = jax.process_index() == source
  return np.asarray(multihost_utils.broadcast_one_to_all(own, is_source=is_source))


def _read(path: Path) -> str:
  try:
    return paths.read(path).decode(errors="replace")
  except FileNotFoundError:
    return ""
