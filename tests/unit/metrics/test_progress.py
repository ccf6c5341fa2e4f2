import io
import logging
import os
import re
import subprocess
import sys
import tty

import pytest
from absl import logging as absl_logging

from ats_jax.metrics.progress import MOST_BLOCKS, Curve, ProgressBar, duration

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
  """A pseudo-terminal, and the screen a person would see on it (lines may be of any length)."""

  def __init__(self):
    self._master, slave = os.openpty()
    tty.setraw(slave)
    os.set_blocking(self._master, False)
    self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115
    self._raw = b""

  def raw(self):
    self.stream.flush()
    try:
      while chunk := os.read(self._master, 65536):
        self._raw += chunk
    except BlockingIOError:
      pass
    return self._raw.decode()

  def screen(self):
    """Lines without colours, one string each."""
    lines, row, column = [""], 0, 0
    text = re.sub(r"\x1b\[([\d;]*m|\?25[hl])", "", self.raw())
    for token in re.findall(r"\x1b\[\d*[A-Z]|[\r\n]|[^\r\n\x1b]+", text):
      if token == "\n":
        row, column = row + 1, 0
        lines += [""] * (row + 1 - len(lines))
      elif token == "\r":
        column = 0
      elif token == "\x1b[2K":
        lines[row] = ""
      elif token.startswith("\x1b"):
        raise AssertionError(f"a control sequence that this screen does not know: {token!r}")
      else:
        lines[row] = lines[row][:column] + token + lines[row][column + len(token) :]
        column += len(token)
    return [line.rstrip() for line in lines]

  def close(self):
    self.stream.close()
    os.close(self._master)


@pytest.fixture
def terminal(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "100")
  terminal = Terminal()
  yield terminal
  terminal.close()


def test_the_bar_shows_the_state_and_stays_at_the_end(terminal):
  clock = Clock()
  with ProgressBar(400, stream=terminal.stream, clock=clock) as progress:
    clock.now = 60.0  # compiling
    progress.update(1)
    clock.now = 70.0
    progress.update(101, METRICS)
    tail = "123.5k tok/s  MFU 41.2%  device 70.2 GiB"
    (line,) = terminal.screen()
    assert re.fullmatch(
      "━+[╸╺]?━+ " + re.escape(f"101/400  25%  loss 3.2105  ETA 30s  {tail}"), line
    )
    clock.now = 100.0
    progress.update(400)
  (line, rest) = terminal.screen()
  assert re.match(r"━+ 400/400 100%  loss 3.2105  in 1m40s  123.5k tok/s", line)
  assert rest == ""


def test_the_bar_shows_the_course_of_the_loss_and_the_health(terminal):
  with ProgressBar(400, stream=terminal.stream, clock=Clock(), redraw_secs=0.0) as progress:
    for step, loss in enumerate((8.0, 1.0, float("nan"), 4.0), 1):
      progress.update(step, {"train/loss": loss, "orchestrator/health": step // 4})
    progress.update(5, {"orchestrator/lr_scale": 0.5})
    assert "loss 4.0000  █▁▄  health: warning  rate x 0.5" in terminal.screen()[0]


def test_a_curve_has_the_whole_course_in_few_blocks():
  curve = Curve()
  for step in range(1000):
    curve.add(1000.0 - step)
  assert MOST_BLOCKS / 2 <= len(str(curve)) < MOST_BLOCKS
  assert list(str(curve)) == sorted(str(curve), reverse=True) and str(curve)[0] == "█"


@pytest.mark.parametrize("columns", [12, 30, 80])
def test_a_line_never_wraps(terminal, monkeypatch, columns):
  monkeypatch.setenv("COLUMNS", str(columns))
  with ProgressBar(400, stream=terminal.stream, clock=Clock()) as progress:
    progress.update(200, METRICS)
    (line,) = terminal.screen()
    assert "200/400" in line and len(line) <= columns


def test_other_output_stays_whole_above_the_bar(terminal, monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal.stream)
  monkeypatch.setattr(sys, "stderr", terminal.stream)
  absl_handler = absl_logging.get_absl_handler().python_handler
  own, root = logging.StreamHandler(terminal.stream), logging.getLogger()
  monkeypatch.setattr(root, "handlers", [own])
  monkeypatch.setattr(absl_handler, "stream", terminal.stream)
  long = "[bold] :smile: " + "word " * 50 + "end"
  with ProgressBar(9, stream=terminal.stream, clock=Clock()) as progress:
    print("before the bar")
    progress.update(1)
    print("half a", end=" ")
    progress.update(2)
    print("line")
    root.warning("from logging")
    absl_handler.handle(absl_handler_record("from absl"))
    print("", end="")
    print(f"one\n{long}\nlines", file=sys.stderr)
    assert terminal.screen()[-1].endswith("1/9  11%")
  screen = terminal.screen()
  assert screen[:3] == ["before the bar", "half a line", "from logging"]
  # absl says once that flags are not parsed yet, if no other test made it say so.
  absl_lines, screen = screen[3:-5], screen[-5:]
  assert 1 <= len(absl_lines) <= 2 and absl_lines[-1].endswith("from absl")
  assert screen[:3] == ["one", long, "lines"]
  assert "2/9  22%" in screen[3] and screen[4] == ""
  assert sys.stdout is terminal.stream and sys.stderr is terminal.stream
  assert own.stream is terminal.stream and absl_handler.stream is terminal.stream


def absl_handler_record(text):
  return absl_logging.get_absl_logger().makeRecord(
    "absl", logging.WARNING, "test.py", 1, text, (), None
  )


def test_an_exception_leaves_the_last_state_and_a_clean_terminal(terminal, monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal.stream)
  with pytest.raises(KeyError), ProgressBar(9, stream=terminal.stream) as progress:
    progress.update(3)
    hidden, shown = terminal.raw().rfind("\x1b[?25l"), terminal.raw().rfind("\x1b[?25h")
    assert hidden < shown  # who kills the process would otherwise have no cursor
    print("no newline", end="")
    raise KeyError
  lines = terminal.screen()
  assert lines[0] == "no newline" and " 3/9  33%  in 0s" in lines[1] and lines[2:] == [""]
  assert sys.stdout is terminal.stream


def test_drawing_is_rate_limited(terminal):
  clock = Clock()
  with ProgressBar(1000, stream=terminal.stream, redraw_secs=0.1, clock=clock) as progress:
    for step in range(1, 1001):
      clock.now = step / 1000
      progress.update(step)
      terminal.raw()  # a full pseudo-terminal blocks the writer
  assert 9 <= terminal.raw().count("/1000") <= 12


def test_without_a_terminal_nothing_of_it_is_imported():
  program = """if True:
    import sys
    from ats_jax.metrics.progress import ProgressBar
    with ProgressBar(9) as progress:
      progress.update(3)
    with ProgressBar(9, enabled=False) as progress:
      progress.update(3)
    print([name for name in sys.modules if name.partition(".")[0] == "rich"])
  """
  run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert run.stdout == "[]\n"
  assert run.stderr.splitlines() == ["step 3/9  33%", "step 3/9  33%  in 0s"]


def test_a_file_gets_plain_lines_now_and_then():
  stream, clock = io.StringIO(), Clock()
  with ProgressBar(400, start_step=100, stream=stream, plain_secs=30.0, clock=clock) as progress:
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


def test_output_that_is_no_terminal(terminal, monkeypatch):
  file = io.StringIO()
  with ProgressBar(9, enabled=False, stream=terminal.stream) as progress:
    progress.update(1, METRICS)
  with monkeypatch.context() as patched:
    patched.setattr(sys, "stdout", file)
    with ProgressBar(9, stream=terminal.stream) as progress:
      progress.update(1)
      print("a result")
  assert file.getvalue() == "a result\n" and "result" not in terminal.raw()
  before = len(terminal.raw())
  monkeypatch.setenv("TERM", "dumb")
  with ProgressBar(9, stream=terminal.stream) as progress:
    progress.update(1)
  assert terminal.raw()[before:].splitlines()[0].startswith("step 1/9")
  assert "\x1b" not in terminal.raw()[before:]


def test_durations():
  shown = {0: "0s", 59.6: "1m00s", 192: "3m12s", 3600 * 5 + 425: "5h07m", 183_600: "2d03h"}
  assert {secs: duration(secs) for secs in shown} == shown


def test_a_rate_has_four_digits_at_most():
  for speed, shown in ((12.4, "12"), (1839.2, "1,839"), (123_456, "123.5k"), (2.5e7, "25M")):
    stream = io.StringIO()
    with ProgressBar(10, stream=stream) as progress:
      progress.update(10, {"train/tokens_per_sec": speed})
    assert f" {shown} tok/s" in stream.getvalue()
