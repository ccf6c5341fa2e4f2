import fcntl
import io
import logging
import os
import re
import struct
import sys
import termios
import tty

import pytest
from absl import logging as absl_logging

from ats_jax.metrics.progress import Progress, duration

METRICS = {
  "train/loss": 3.21049,
  "train/tokens_per_sec": 123456.0,
  "train/mfu": 0.412,
  "memory/host_rss_gib": 1.5,
  "memory/device_peak_gib": 70.25,
}


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


class Terminal:
  """A pseudo-terminal, and the screen a person would see on it (wide enough not to wrap)."""

  def __init__(self, columns):
    self._master, slave = os.openpty()
    tty.setraw(slave)
    os.set_blocking(self._master, False)
    self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115
    self._raw = b""
    self.resize(columns)

  def resize(self, columns):
    fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

  def raw(self):
    self.stream.flush()
    try:
      while chunk := os.read(self._master, 65536):
        self._raw += chunk
    except BlockingIOError:
      pass
    return self._raw.decode()

  def screen(self):
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[K|[\r\n]|[^\r\n\x1b]+", self.raw()):
      if token == "\n":
        lines.append("")
        column = 0
      elif token == "\r":
        column = 0
      elif token == "\x1b[K":
        lines[-1] = lines[-1][:column]
      else:
        lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token) :]
        column += len(token)
    return [line.rstrip() for line in lines]

  def close(self):
    self.stream.close()
    os.close(self._master)


@pytest.fixture
def terminal(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  terminal = Terminal(columns=100)
  yield terminal
  terminal.close()


def test_the_bar_shows_the_state_and_stays_at_the_end(terminal):
  clock = Clock()
  with Progress(400, stream=terminal.stream, clock=clock) as progress:
    clock.now = 60.0  # compiling
    progress.update(1)
    clock.now = 70.0
    progress.update(101, METRICS)
    tail = "123.5k tok/s  MFU 41.2%  device 70.2 GiB"
    # 24 columns of bar is the most, and 99 of the 100 columns are used.
    (line,) = terminal.screen()
    assert line == f"[=====               ] 101/400  25%  loss 3.2105  ETA 30s  {tail}"
    assert len(line) == 99
    clock.now = 100.0
    progress.update(400)
  (line, rest) = terminal.screen()
  assert re.match(r"\[=+\] 400/400 100%  loss 3.2105  in 1m40s  123.5k tok/s", line)
  assert rest == ""


@pytest.mark.parametrize("columns", [1, 5, 12, 30, 60, 80, 300])
def test_the_line_fits_the_terminal(terminal, columns):
  terminal.resize(columns)
  clock = Clock()
  with Progress(400, stream=terminal.stream, clock=clock) as progress:
    for step in (1, 200):
      clock.now = float(step)
      progress.update(step, METRICS)
  widths = [len(line) for line in terminal.screen()]
  assert max(widths) <= max(columns - 1, 0)
  assert max(widths) >= min(columns - 1, 24)  # and uses the room there is


def test_a_resize_is_followed(terminal):
  clock = Clock()
  with Progress(400, stream=terminal.stream, clock=clock) as progress:
    for step, columns in ((1, 100), (200, 40)):
      terminal.resize(columns)
      clock.now = float(step)
      progress.update(step, METRICS)
    assert terminal.screen() == ["200/400  50%  loss 3.2105  ETA 3m20s"]


def test_other_output_stays_whole_above_the_bar(terminal, monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal.stream)
  monkeypatch.setattr(sys, "stderr", terminal.stream)
  absl_handler = absl_logging.get_absl_handler().python_handler
  own = logging.StreamHandler(terminal.stream)
  root = logging.getLogger()
  monkeypatch.setattr(root, "handlers", [own])
  monkeypatch.setattr(absl_handler, "stream", terminal.stream)
  clock = Clock()
  with Progress(9, stream=terminal.stream, clock=clock) as progress:
    print("before the bar")
    for step in (1, 2, 3):
      clock.now = float(step)
      progress.update(step)
      if step == 1:
        print("half a", end=" ")
      if step == 2:
        print("line")
        root.warning("from logging")
        absl_handler.handle(absl_handler_record("from absl"))
        print("", end="")
        print("one\ntwo\nlines", file=sys.stderr)
    assert terminal.screen()[-1].endswith("3/9  33%  ETA 6s")
  screen = terminal.screen()
  assert screen[:3] == ["before the bar", "half a line", "from logging"]
  # absl says once that flags are not parsed yet, if no other test made it say so.
  absl_lines, screen = screen[3:-5], screen[-5:]
  assert 1 <= len(absl_lines) <= 2 and absl_lines[-1].endswith("from absl")
  assert screen[:3] == ["one", "two", "lines"]
  assert screen[3].startswith("[") and screen[4] == ""
  assert sys.stdout is terminal.stream and sys.stderr is terminal.stream
  assert own.stream is terminal.stream and absl_handler.stream is terminal.stream


def absl_handler_record(text):
  return absl_logging.get_absl_logger().makeRecord(
    "absl", logging.WARNING, "test.py", 1, text, (), None
  )


def test_an_exception_leaves_the_last_state_and_a_clean_terminal(terminal, monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal.stream)
  with pytest.raises(KeyError), Progress(9, stream=terminal.stream) as progress:
    progress.update(3)
    print("no newline", end="")
    raise KeyError
  lines = terminal.screen()
  assert lines[0] == "no newline" and " 3/9  33%  in 0s" in lines[1] and lines[2:] == [""]
  assert sys.stdout is terminal.stream


def test_drawing_is_rate_limited(terminal):
  clock = Clock()
  with Progress(10_000, stream=terminal.stream, redraw_secs=0.1, clock=clock) as progress:
    for step in range(1, 10_001):
      clock.now = step / 1000
      progress.update(step)
      terminal.raw()  # a full pseudo-terminal blocks the writer
  assert 90 <= terminal.raw().count("\r") <= 110


def test_a_file_gets_plain_lines_now_and_then():
  stream, clock = io.StringIO(), Clock()
  with Progress(400, start_step=100, stream=stream, plain_secs=30.0, clock=clock) as progress:
    for step in range(101, 401):
      clock.now += 0.25
      progress.update(step, METRICS if step == 110 else None)
  tail = "123.5k tok/s  MFU 41.2%  device 70.2 GiB"
  assert stream.getvalue().splitlines() == [
    "step 101/400  25%",
    f"step 221/400  55%  loss 3.2105  ETA 45s  {tail}",
    f"step 341/400  85%  loss 3.2105  ETA 15s  {tail}",
    f"step 400/400 100%  loss 3.2105  in 1m15s  {tail}",
  ]


def test_a_disabled_bar_shows_nothing(terminal):
  with Progress(9, enabled=False, stream=terminal.stream) as progress:
    progress.update(1, METRICS)
  assert terminal.raw() == ""


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
  monkeypatch.setenv("TERM", "dumb")
  with Progress(9, stream=terminal.stream) as progress:
    progress.update(1)
  assert "\x1b" not in terminal.raw() and "\r" not in terminal.raw()


@pytest.mark.parametrize(
  ("secs", "text"),
  [(0, "0s"), (59.6, "1m00s"), (192, "3m12s"), (3600 * 5 + 425, "5h07m"), (183_600, "2d03h")],
)
def test_durations(secs, text):
  assert duration(secs) == text


@pytest.mark.parametrize(
  ("speed", "shown"), [(12.4, "12"), (1839.2, "1,839"), (123_456, "123.5k"), (2.5e7, "25M")]
)
def test_a_rate_has_four_digits_at_most(speed, shown):
  with io.StringIO() as stream:
    with Progress(10, stream=stream) as progress:
      progress.update(1)
      progress.update(10, {"train/tokens_per_sec": speed})
    assert f" {shown} tok/s" in stream.getvalue()
