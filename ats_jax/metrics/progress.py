"""A progress bar on a terminal; plain lines now and then where there is none."""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO, override

from absl import logging as absl_logging

from ats_jax.metrics.writer import MetricWriter

if TYPE_CHECKING:
  from rich.progress import Progress as Bar


PHASES = ("warm-up", "stable", "decay")  # of the learning rate; `progress/phase` is an index
LEVELS = ("", "health: warning", "health: critical")  # `orchestrator/health` is an index
BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BLOCKS = 16


class Curve:
  """The course of a value in at most `MOST_BLOCKS` blocks, from the first one to the newest."""

  def __init__(self):
    """Begin with nothing."""
    self._means: list[float] = []
    self._each = 1  # values of a mean
    self._open: list[float] = []  # of the next one

  def add(self, value: float) -> None:
    """Take a value; one that is not finite is left out."""
    if not math.isfinite(value):
      return
    self._open.append(value)
    if len(self._open) == self._each:
      self._means.append(sum(self._open) / self._each)
      self._open = []
    if len(self._means) == MOST_BLOCKS:
      pairs = zip(self._means[::2], self._means[1::2], strict=True)
      self._means, self._each = [(a + b) / 2 for a, b in pairs], 2 * self._each

  def __str__(self) -> str:
    low, high = min(self._means, default=0.0), max(self._means, default=0.0)
    if low == high:
      return ""
    return "".join(BLOCKS[round((m - low) / (high - low) * (len(BLOCKS) - 1))] for m in self._means)


class ProgressBar(MetricWriter):
  """One line, redrawn in place: bar, step, loss and its course, time left, speed, MFU, memory.

  While the orchestrator's health report is not good, its level is in the line too. As one of the
  writers of a run it learns all metrics; the last ones stay on show.

  ```
  with Progress(cfg.num_steps, start_step=step) as progress:
    ...
    progress.update(step, metrics)
  ```

  While it is drawn on a terminal, whatever else the process prints or logs there (print, warnings,
  absl and root logging handlers) appears above it. Elsewhere (a file, a pipe, a notebook) it prints
  a plain line without control characters every `plain_secs`.
  """

  guarded = False

  def __init__(
    self,
    total_steps: int,
    *,
    start_step: int = 0,
    enabled: bool = True,
    stream: TextIO | None = None,
    redraw_secs: float = 0.1,
    plain_secs: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Plans the bar; it appears with the first `update`.

    Args:
      total_steps: the last step of the run.
      start_step: the restored step, 0 for a new run.
      enabled: False shows nothing (log.progress is off, or not the main process).
      stream: stream to draw on; default: stderr.
      redraw_secs: least time between two drawings on a terminal.
      plain_secs: least time between two lines where there is no terminal.
      clock: seconds.
    """
    self._total = total_steps
    self._step = start_step
    self._enabled = enabled
    self._stream = stream or sys.stderr
    self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
    self._interval = redraw_secs if self._terminal else plain_secs
    self._clock = clock
    self._began = clock()
    self._first: tuple[int, float] | None = None  # the first step done: compilation is behind it
    self._next_draw = 0.0
    self._metrics: dict[str, float] = {}
    self._curve = Curve()
    self._bar: Bar | None = None
    self._stack = contextlib.ExitStack()

  def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
    """Says that `step` steps are done; cheap enough for every step.

    Args:
      step: steps done.
      metrics: newest scalars by name, if no writer has them.
    """
    if not self._enabled:
      return
    self._step = step
    self.write_scalars(step, metrics or {})
    now = self._clock()
    if self._first is None:
      self._first = (step, now)
    if now >= self._next_draw:
      self._next_draw = now + self._interval
      self._draw(self._time_left())

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Take metrics for the next drawing."""
    del step
    self._metrics.update(scalars)
    if "train/loss" in scalars:
      self._curve.add(float(scalars["train/loss"]))

  @override
  def flush(self) -> None:
    """Nothing of it is kept."""

  @override
  def close(self) -> None:
    """Leaves the final state on the screen and gives the terminal back."""
    with self._stack:
      if self._enabled and self._first is not None:
        self._enabled = False
        self._draw(f"in {duration(self._clock() - self._began)}")

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _draw(self, timing: str) -> None:
    share = min(self._step / self._total, 1.0) if self._total else 1.0
    head = f"{self._step}/{self._total} {share:4.0%}"
    curve = str(self._curve) if self._terminal else ""
    loss = [*_loss(self._metrics), curve, *_health(self._metrics)]
    parts = [head, *_course(self._metrics), *loss, timing, *_rest(self._metrics)]
    text = "  ".join(filter(None, parts))
    if not self._terminal:
      self._stream.write(f"step {text}\n")
      self._stream.flush()
      return
    if self._bar is None:
      self._bar = self._stack.enter_context(_bar(self._stream, self._total))
    self._bar.update(self._bar.task_ids[0], completed=self._step, description=text, refresh=True)

  def _time_left(self) -> str:
    if self._first is None or self._step <= self._first[0]:
      return ""
    steps, secs = self._step - self._first[0], self._clock() - self._first[1]
    return f"ETA {duration(secs / steps * (self._total - self._step))}"


def duration(secs: float) -> str:
  """Returns "42s", "3m12s", "5h07m" or "2d03h"."""
  minutes, s = divmod(round(secs), 60)
  hours, m = divmod(minutes, 60)
  days, h = divmod(hours, 24)
  if days:
    return f"{days}d{h:02d}h"
  if hours:
    return f"{h}h{m:02d}m"
  return f"{m}m{s:02d}s" if minutes else f"{s}s"


def _course(metrics: Mapping[str, Any]) -> Iterator[str]:
  if share := metrics.get("progress/share"):
    tokens = metrics["progress/tokens"]
    yield f"{_rate(tokens)} of {_rate(tokens / share)} tokens"
    yield PHASES[int(metrics["progress/phase"])]


def _loss(metrics: Mapping[str, Any]) -> Iterator[str]:
  if "train/loss" in metrics:
    yield f"loss {metrics['train/loss']:.4f}"


def _health(metrics: Mapping[str, Any]) -> Iterator[str]:
  yield LEVELS[int(metrics.get("orchestrator/health", 0))]
  if (scale := metrics.get("orchestrator/lr_scale", 1.0)) != 1.0:
    yield f"rate x {scale:.3g}"


def _rest(metrics: Mapping[str, Any]) -> Iterator[str]:
  if "train/tokens_per_sec" in metrics:
    yield f"{_rate(metrics['train/tokens_per_sec'])} tok/s"
  if "train/mfu" in metrics:
    yield f"MFU {metrics['train/mfu']:.1%}"
  where = "device_peak" if "memory/device_peak_gib" in metrics else "host_rss"
  if f"memory/{where}_gib" in metrics:
    yield f"{where.split('_')[0]} {metrics[f'memory/{where}_gib']:.1f} GiB"


def _rate(value: float) -> str:
  for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if value >= 10 * size:
      return f"{value / size:.4g}{unit}"
  return f"{value:,.0f}"


@contextlib.contextmanager
def _bar(stream: TextIO, total_steps: int) -> Iterator["Bar"]:
  """A bar and its description in one line of a terminal, below whatever else is written there."""
  from rich.console import Console
  from rich.progress import BarColumn, Progress, TextColumn

  # Lines of others are written as they are: neither wrapped nor read as markup.
  console = Console(
    file=stream, force_terminal=True, soft_wrap=True, markup=False, emoji=False, highlight=False
  )
  streams = (sys.stdout, sys.stderr)
  bar = Progress(
    BarColumn(24),
    TextColumn("{task.description}", markup=False),
    console=console,
    auto_refresh=False,
    redirect_stdout=sys.stdout.isatty(),
    redirect_stderr=sys.stderr.isatty(),
  )
  bar.add_task("", total=total_steps)
  with contextlib.ExitStack() as stack:
    stack.enter_context(bar)
    console.show_cursor(True)  # whoever kills the process gets a terminal with a cursor
    redirected = (sys.stdout, sys.stderr)
    for handler in (*logging.getLogger().handlers, absl_logging.get_absl_handler().python_handler):
      if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
        stack.callback(handler.setStream, handler.stream)
        handler.setStream(redirected[streams.index(handler.stream)])
    # rich holds the beginning of a line back until its end: at the end of the bar it is written.
    stack.callback(lambda: [stream.flush() for stream in redirected])
    yield bar
