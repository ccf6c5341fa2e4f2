"""Signals, sent to real processes."""

import signal
import time

import pytest

from ats_jax.checkpoint import StopSignal
from ats_jax.checkpoint.preemption import ECHO_SECS

LOOP = """
import sys, time
from ats_jax.checkpoint import StopSignal

with StopSignal() as stop:
  print("ready", flush=True)
  while not stop.requested:
    time.sleep(0.01)
  print("stopping", stop.requested, stop.agreed(0), flush=True)
  time.sleep(float(sys.argv[1]))
  print("saved", flush=True)
print("handlers are back", flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_first_signal_sets_the_flag_and_says_so(start_child):
  children = {name: start_child(LOOP, 0) for name in ("SIGTERM", "SIGINT")}
  for name, child in children.items():
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.Signals[name])
  for name, child in children.items():
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0
    assert out.splitlines() == [f"stopping {name} {name}", "saved", "handlers are back"]
    assert err == f"\n{name}: finishing the step and saving; press Ctrl-C again to exit at once\n"


def test_second_signal_ends_the_process_and_an_echo_does_not(start_child):
  children = {name: start_child(LOOP, 60) for name in ("SIGINT", "SIGTERM")}
  for child in children.values():
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "stopping SIGTERM SIGTERM\n"
    child.send_signal(signal.SIGTERM)
  time.sleep(ECHO_SECS)
  for name, child in children.items():
    assert child.poll() is None
    child.send_signal(signal.Signals[name])
    assert child.wait(timeout=10) == 128 + signal.Signals[name]
    assert child.stdout.read() == ""


def test_handlers_are_restored_after_an_exception():
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyError), StopSignal() as stop:
    assert signal.getsignal(signal.SIGTERM) != before[0]
    raise KeyError
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
  assert stop.requested is None


def test_after_the_loop_ctrl_c_is_ctrl_c_again(start_child):
  child = start_child(LOOP, 0.3)
  child.stdout.readline()
  child.send_signal(signal.SIGTERM)
  assert [child.stdout.readline() for _ in range(3)][-1] == "handlers are back\n"
  child.send_signal(signal.SIGTERM)
  assert child.wait(timeout=10) == -signal.SIGTERM
