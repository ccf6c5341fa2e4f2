"""A progress bar on a terminal; plain lines now and then where there is none."""

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TextIO

from absl import logging as absl_logging

_ERASE_LINE = "\r\x1b[K"


class Progress:
  """One line, redrawn in place: bar, step, loss, speed, MFU, time left, memory.

  ```
  with Progress(cfg.num_steps, start_step=step) as progress:
    ...
    progress.update(step, metrics)
  ```

  While it is drawn on a terminal, whatever else the process prints or logs there (print, warnings,
  absl and root logging handlers) appears above it. Elsewhere (a file, a pipe) it prints a plain
  line without control characters every `plain_secs`.
  """

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
    """Plans the bar; it appears with the first `update` inside the `with` block.

    Args:
      total_steps: the last step of the run.
      start_step: the restored step, 0 for a new run.
      enabled: False shows nothing (log.progress is off, or not the main process).
      stream: where to draw; default: stderr.
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
    self._lock = threading.RLock()  # a checkpoint thread may log while the bar is redrawn
    self._mid_line = False  # other output has left the cursor inside a line
    self._stack = contextlib.ExitStack()

  def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
    """Says that `step` steps are done; cheap enough for every step.

    Args:
      step: steps done.
      metrics: newest scalars by name, if there are any; the last ones stay on show.
    """
    if not self._enabled:
      return
    self._step = step
    self._metrics.update(metrics or {})
    now = self._clock()
    if self._first is None:
      self._first = (step, now)
    if now >= self._next_draw:
      self._next_draw = now + self._interval
      self._draw()

  def close(self) -> None:
    """Leaves the final state on the screen and gives the terminal back."""
    if self._enabled and self._first is not None:
      self._enabled = False
      with self._lock:
        start = "\n" if self._mid_line else _ERASE_LINE if self._terminal else ""
        line = self._line(f"in {duration(self._clock() - self._began)}")
        self._stream.write(start + line + "\n")
        self._stream.flush()
    self._stack.close()

  def __enter__(self) -> Self:
    if self._enabled and self._terminal:
      self._stack.enter_context(_terminal_output_through(self))
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _draw(self) -> None:
    with self._lock:
      if not self._terminal:
        self._stream.write(self._line(self._time_left()) + "\n")
      elif not self._mid_line:
        self._stream.write(_ERASE_LINE + self._line(self._time_left()))
      self._stream.flush()

  @contextlib.contextmanager
  def _above(self) -> Iterator[None]:
    """Takes the bar away for other output and draws it again below."""
    with self._lock:
      shown = self._enabled and self._terminal and self._first is not None
      if shown and not self._mid_line:
        self._stream.write(_ERASE_LINE)
        self._stream.flush()
      yield
      if shown:
        self._draw()

  def _time_left(self) -> str:
    if self._first is None or self._step <= self._first[0]:
      return ""
    steps, secs = self._step - self._first[0], self._clock() - self._first[1]
    return f"ETA {duration(secs / steps * (self._total - self._step))}"

  def _line(self, timing: str) -> str:
    """The state in words, cut to the terminal's width: the last fields go first, then the bar."""
    share = min(self._step / self._total, 1.0) if self._total else 1.0
    head = f"{self._step}/{self._total} {share:4.0%}"
    fields = [head, *filter(None, [*_loss(self._metrics), timing, *_rest(self._metrics)])]
    if not self._terminal:
      return "step " + "  ".join(fields)
    width = _columns(self._stream) - 1  # a full last column makes some terminals wrap
    while len(fields) > 1 and len("  ".join(fields)) > width:
      fields.pop()
    text = "  ".join(fields)
    room = min(width - len(text) - 3, 24)  # brackets and a space
    if room < 6:
      return text[:width]
    return f"[{'=' * round(room * share):<{room}}] {text}"


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


def _loss(metrics: Mapping[str, Any]) -> Iterator[str]:
  if "train/loss" in metrics:
    yield f"loss {metrics['train/loss']:.4f}"


def _rest(metrics: Mapping[str, Any]) -> Iterator[str]:
  if "train/tokens_per_sec" in metrics:
    yield f"{_rate(metrics['train/tokens_per_sec'])} tok/s"
  if "train/mfu" in metrics:
    yield f"MFU {metrics['train/mfu']:.1%}"
  where = "device_peak" if "memory/device_peak_gib" in metrics else "host_rss"
  if f"memory/{where}_gib" in metrics:
    yield f"{where.split('_')[0]} {metrics[f'memory/{where}_gib']:.1f} GiB"


def _rate(value: float) -> str:
  for unit, size in (("M", 1e6), ("k", 1e3)):
    if value >= 10 * size:
      return f"{value / size:.4g}{unit}"
  return f"{value:,.0f}"


def _columns(stream: TextIO) -> int:
  """Width of the terminal, 80 where the stream has no size to tell."""
  try:
    return os.get_terminal_size(stream.fileno()).columns or 80
  except (OSError, io.UnsupportedOperation):
    return 80


class _AboveBar:
  """A text stream that puts what is written to it above the bar."""

  def __init__(self, stream: TextIO, progress: Progress):
    self._stream = stream
    self._progress = progress

  def write(self, text: str) -> int:
    if not text:
      return 0
    with self._progress._above():
      count = self._stream.write(text)
      self._stream.flush()
      # print() writes its text and its newline apart: the bar waits for the line to end.
      self._progress._mid_line = not text.endswith("\n")
    return count

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def _terminal_output_through(progress: Progress) -> Iterator[None]:
  """Sends stdout, stderr and the log handlers that write to a terminal through `_AboveBar`."""
  handlers = [*logging.getLogger().handlers, absl_logging.get_absl_handler().python_handler]
  with contextlib.ExitStack() as stack:
    for name in ("stdout", "stderr"):
      stream = getattr(sys, name)
      if not stream.isatty():
        continue
      above: Any = _AboveBar(stream, progress)
      setattr(sys, name, above)
      stack.callback(setattr, sys, name, stream)
      for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
          handler.setStream(above)
          stack.callback(handler.setStream, stream)
    yield
