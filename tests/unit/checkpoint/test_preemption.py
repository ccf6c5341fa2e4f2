"""Signals, sent to real processes, which wait for lines on their standard input."""

import signal

import pytest

from ats_jax.checkpoint import StopSignal
from ats_jax.checkpoint.preemption import ECHO_SECS

HANG_SECS = 120  # then a child will not answer any more

# Each line is the time that the clock is set to, and is answered.
LOOP = """
import sys
from types import SimpleNamespace
from ats_jax.checkpoint import StopSignal, preemption

now = 0.0
preemption.time = SimpleNamespace(monotonic=lambda: now)
say = lambda *words: print(*words, flush=True)

def wait():
  global now
  now = float(sys.stdin.readline())
  say("at", now)

with StopSignal() as stop:
  say("ready")
  wait()
  say("stopping", stop.requested, stop.agreed(0))
  wait()
  wait()
  say("saved")
say("handlers are back")
wait()
"""


def tell(child, now):
  """Set the clock of a child; return the line that it prints when it has read that."""
  child.stdin.write(f"{now}\n")
  child.stdin.flush()
  return child.stdout.readline()


def stopping(child, name):
  """Send a child its first signal, and let it see that."""
  assert child.stdout.readline() == "ready\n"
  child.send_signal(signal.Signals[name])
  assert tell(child, 0.0) == "at 0.0\n"
  assert child.stdout.readline() == f"stopping {name} {name}\n"


def test_the_first_signal_sets_the_flag_and_after_the_loop_it_is_as_ever(start_child):
  child = start_child(LOOP)
  stopping(child, "SIGINT")
  for _ in range(2):
    tell(child, 1.0)
  assert [child.stdout.readline() for _ in range(2)] == ["saved\n", "handlers are back\n"]
  child.send_signal(signal.SIGTERM)
  assert child.wait(timeout=HANG_SECS) == -signal.SIGTERM
  said = "\nSIGINT: finishing the step and saving; press Ctrl-C again to exit at once\n"
  assert child.stderr.read() == said


def test_a_second_signal_ends_the_process_and_an_echo_does_not(start_child):
  child = start_child(LOOP)
  stopping(child, "SIGTERM")
  child.send_signal(signal.SIGTERM)  # passed on by the terminal, at the same time
  assert tell(child, ECHO_SECS) == f"at {ECHO_SECS}\n"
  child.send_signal(signal.SIGINT)
  out, _ = child.communicate("1.0\n", timeout=HANG_SECS)  # not enough to go on to the end
  assert child.returncode == 128 + signal.SIGINT and "saved" not in out


def test_handlers_are_restored_after_an_exception():
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyError), StopSignal() as stop:
    assert signal.getsignal(signal.SIGTERM) != before[0]
    raise KeyError
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
  assert stop.requested is None
