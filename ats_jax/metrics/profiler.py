"""Profiler traces of a few steps: which kernels took their time, and what was waited for."""

import collections
import contextlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import jax
from absl import logging
from jax.profiler import ProfileData

from ats_jax.metrics.watcher import Watcher
from ats_jax.store import paths
from ats_jax.store.paths import Path

NAME_WIDTH = 72  # C++ kernels have names of many lines
SUMMARY = "summary.json"
KEPT_KERNELS, KEPT_WIDTH = 20, 200  # in the file of a trace
# Kernels that send: NCCL's, XLA's own, and copies from one GPU to another.
_SENDS = re.compile(r"nccl|AllReduceKernel|MemcpyP2P")


class ProfileWindow(Watcher):
  """Traces steps `first_step` to `first_step + num_steps - 1`, and as many each `every` steps.

  Each is in a folder named by its first step, which TensorBoard, XProf and Perfetto show, with what
  `summary` gives in `SUMMARY`.

  ```
  with ProfileWindow(cfg.log.profile_step, 3, workdir / "profile") as profile:
    for step in ...:
      profile.before(step, state)
      state = train_step(state, batch)
  ```
  """

  def __init__(self, first_step: int, num_steps: int, directory: Path, every: int = 0):
    """Plans the windows.

    Args:
      first_step: 0 = no trace. A run resumed past this step makes no first one.
      num_steps: at least 1.
      directory: folder of the traces.
      every: steps from one window to the next; 0 = there is one.

    Raises:
      ValueError: a negative first step or no steps.
    """
    if first_step < 0 or num_steps < 1:
      raise ValueError(
        f"profile window of {num_steps} steps from step {first_step}: expected at least one step, "
        "from step 1 or later (0 = none)"
      )
    self._first, self._every, self._num_steps = first_step, every, num_steps
    self._directory, self._began = directory, 0
    self._local: Path | None = None  # where a running trace goes
    self._filled = contextlib.ExitStack()

  def before(self, step: int, state: Any = None) -> None:
    """Starts or stops the trace if it is time; call it ahead of every step.

    Args:
      step: the step about to run.
      state: what the step before it produced. It is waited for at the two edges of the window, so
        that the trace holds the device work of the chosen steps and no other.
    """
    if self._local is not None and step >= self._began + self._num_steps:
      jax.block_until_ready(state)
      self.close()
    if self._local is None and self._is_due(step):
      jax.block_until_ready(state)
      self._began = step
      self._local = self._filled.enter_context(paths.filled(self._directory / str(step)))
      jax.profiler.start_trace(str(self._local), create_perfetto_trace=True)

  def _is_due(self, step: int) -> bool:
    if not self._first or step < self._first:
      return False
    since = step - self._first
    return since % self._every == 0 if self._every else since == 0

  def close(self) -> None:
    """Ends a running trace and writes it."""
    if self._local is not None:
      local, self._local = self._local, None
      jax.profiler.stop_trace()
      trace = pathlib.Path(local)
      text = summarise_trace(trace)
      if jax.process_index() == 0:
        facts = {"step": self._began, "steps": self._num_steps, **summary(trace)}
        (trace / SUMMARY).write_text(json.dumps(facts, indent=1) + "\n")
      self._filled.close()
      where = self._directory / str(self._began)
      logging.info("profiler trace of steps from %d: %s\n%s", self._began, where, text)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


class KernelTime(NamedTuple):
  """The time of all launches of one kernel in a trace.

  Attributes:
    name: name of the kernel on a GPU, of the instruction of XLA on a CPU.
    calls: number of launches, over all devices of this process.
    secs: seconds that they took in sum.
    share: their share of the time of all kernels, from 0 to 1.
  """

  name: str
  calls: int
  secs: float
  share: float


class Span(NamedTuple):
  """What one GPU did in a trace; seconds.

  Attributes:
    gpu: name of the GPU in the trace.
    secs: from the begin of its first kernel to the end of its last.
    sending: while a collective ran.
    exposed: while collectives ran and nothing else.
    idle: while nothing ran.
  """

  gpu: str
  secs: float
  sending: float
  exposed: float
  idle: float

  def __str__(self) -> str:
    share = lambda secs: f"{1e3 * secs:,.2f} ms ({secs / self.secs:.1%})"
    return (
      f"{self.gpu}: {1e3 * self.secs:,.2f} ms; collectives ran for {share(self.sending)}, with "
      f"nothing beside them for {share(self.exposed)}; nothing ran for {share(self.idle)}"
    )


def summarise_trace(folder: pathlib.Path) -> str:
  """The newest trace in a folder as text: a table of kernels, and a line a GPU if some send.

  Raises:
    ValueError: if there is no trace.
  """
  sent = [str(span) for span in spans(folder) if span.sending]
  return "\n".join([kernel_table(kernel_times(folder)), *sent])


def summary(folder: pathlib.Path) -> dict[str, Any]:
  """The newest trace in a folder as JSON values: its longest kernels, and what each GPU did.

  Raises:
    ValueError: if there is no trace.
  """
  kernels = kernel_times(folder)
  return {
    "num_kernels": len(kernels),
    "kernels": [
      {**kernel._asdict(), "name": kernel.name[:KEPT_WIDTH]} for kernel in kernels[:KEPT_KERNELS]
    ],
    "devices": [span._asdict() for span in spans(folder)],
  }


def spans(folder: pathlib.Path) -> list[Span]:
  """What each GPU did in the newest trace of a folder; none without GPUs.

  Raises:
    ValueError: if there is no trace.
  """
  of_devices = []
  for gpu, lines in _streams(_newest(folder)).items():
    events = [event for line in lines for event in line.events]
    times = lambda chosen: _union((e.start_ns, e.start_ns + e.duration_ns) for e in chosen)
    every, sends = times(events), times(e for e in events if _SENDS.search(e.name))
    others = times(e for e in events if not _SENDS.search(e.name))
    duration = every[-1][1] - every[0][0]
    exposed = _length(every) - _length(others)
    figures = duration, _length(sends), exposed, duration - _length(every)
    of_devices.append(Span(gpu, *(nanoseconds / 1e9 for nanoseconds in figures)))
  return of_devices


def _union(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
  """Intervals as few as cover the same time, in order."""
  merged = list[tuple[float, float]]()
  for begin, end in sorted(times):
    if merged and begin <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    else:
      merged.append((begin, end))
  return merged


def _length(times: list[tuple[float, float]]) -> float:
  return sum(end - begin for begin, end in times)


def kernel_times(folder: pathlib.Path) -> list[KernelTime]:
  """Sum up the newest trace in a folder that `jax.profiler` wrote to; the longest first.

  Raises:
    ValueError: if there is no trace.
  """
  nanoseconds, calls = collections.Counter[str](), collections.Counter[str]()
  for name, duration in _events(_newest(folder)):
    nanoseconds[name] += duration
    calls[name] += 1
  total = sum(nanoseconds.values()) or 1
  return [
    KernelTime(name, calls[name], ns / 1e9, ns / total) for name, ns in nanoseconds.most_common()
  ]


def _newest(folder: pathlib.Path) -> Any:
  traces = sorted(folder.glob("**/*.xplane.pb"), key=lambda p: p.stat().st_mtime)
  if not traces:
    raise ValueError(f"{folder}: there is no profiler trace (*.xplane.pb). Set log.profile_step.")
  return ProfileData.from_file(str(traces[-1]))


def _streams(trace: Any) -> dict[str, list[Any]]:
  """The streams of each GPU that ran something."""
  streams = collections.defaultdict(list)
  for plane in trace.planes:
    for line in plane.lines:
      if "GPU" in plane.name and line.name.startswith("Stream") and any(True for _ in line.events):
        streams[plane.name].append(line)
  return dict(streams)


def _events(trace: Any) -> Iterator[tuple[str, int]]:
  """Name and nanoseconds of each kernel; without a GPU of each instruction that the CPU ran."""
  streams = [line for lines in _streams(trace).values() for line in lines]
  lines = [line for plane in trace.planes for line in plane.lines]
  for line in streams or [line for line in lines if line.name.startswith("tf_XLA")]:
    for event in line.events:
      bookkeeping = not streams and ("::" in event.name or event.name.startswith("end: "))
      if not bookkeeping:
        yield event.name, int(event.duration_ns)


def kernel_table(kernels: list[KernelTime], rows: int = 15) -> str:
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
