"""Where the time of a profiler trace went: kernels by their share."""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

NAME_WIDTH = 72  # C++ kernels have names of many lines


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


def kernel_times(folder: Path) -> list[Kernel]:
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
