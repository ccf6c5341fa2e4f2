"""Who is silent, behind or slow; what a process that hangs leaves, and how it ends."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import free_port

from ats_jax.cluster.liveness import watchdog
from ats_jax.cluster.liveness.beats import OVER, READING, START, Beat, Roll, late_processes
from ats_jax.cluster.liveness.devices import faults
from ats_jax.cluster.liveness.pace import LEAST_STEPS, Pace, Straggler, slowest
from ats_jax.cluster.liveness.watchdog import PATIENCE, Watchdog
from ats_jax.exits import FAULT
from ats_jax.metrics.goodput import Goodput


def beat(rank, step=5, phase="step", **more):
  return Beat(rank, f"host{rank}", more.pop("count", 1), phase, step, **more)


def roll_of(*beats):
  roll = Roll()
  roll.hear({b.rank: b for b in beats}, now=0.0)
  return roll


def test_a_beat_comes_back_from_its_text():
  sent = beat(3, still_secs=1.5, host_secs=2.0, step_secs=3.0, ends="why")
  assert Beat.from_json(sent.to_json()) == sent


def test_who_repeats_the_same_beat_is_silent():
  roll = roll_of(beat(0), beat(1))
  roll.hear({0: beat(0, count=2), 1: beat(1)}, now=4.0)
  assert roll.silent(5.0, now=5.0) == []
  assert roll.silent(5.0, now=5.1) == [1]
  roll.forgive(now=5.1)  # this process was stopped itself
  assert roll.silent(5.0, now=10.0) == []


def test_who_reads_text_or_is_done_may_be_silent():
  roll = roll_of(beat(0, phase=READING), beat(1, phase=OVER), beat(2, phase=START))
  assert roll.silent(5.0, now=100.0) == [2]


@pytest.mark.parametrize(
  ("beats", "says"),
  [
    ((beat(0), beat(1, step=4)), "behind: process 1 on host1 in step 4 (step)"),
    ((beat(0, phase="data_wait"), beat(1)), "behind: process 0 on host0 in step 5 (data_wait)"),
    ((beat(0), beat(1, phase="compile")), "behind: process 1 on host1 in step 5 (compile)"),
    ((beat(0), beat(1, step=0, phase=START)), "behind: process 1 on host1 in the start (start)"),
    ((beat(0), beat(1)), "all are in the same place, step 5 (step)"),
    ((beat(0), beat(1, phase=OVER), beat(2)), "all are in the same place, step 5 (step)"),
    ((beat(0, phase="eval"),), "it is in step 5 (eval)"),
  ],
)
def test_who_is_behind(beats, says):
  assert late_processes({b.rank: b for b in beats}).startswith(says)


def test_the_silent_come_first():
  beats = {0: beat(0, step=4), 1: beat(1)}
  assert late_processes(beats, [1]).startswith("without a sign of life: process 1 on host1")


@given(
  own=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=9),
  work=st.floats(0.1, 1.0),
  steps=st.integers(LEAST_STEPS, 50),
)
def test_the_slowest_is_the_one_that_others_wait_for(own, work, steps):
  """Each makes its own part; all leave the step when the last has made its own and the work."""
  whole = max(own) + work
  then = {rank: beat(rank, step=10) for rank in range(len(own))}
  now = {
    rank: beat(rank, 10 + steps, host_secs=steps * secs, step_secs=steps * (whole - secs))
    for rank, secs in enumerate(own)
  }
  pace = slowest(then, now)
  assert own[pace.rank] == max(own)
  assert pace.secs == pytest.approx(whole)
  assert pace.ratio >= 1.0 - 1e-9


def test_of_few_steps_or_one_process_nothing_is_said():
  then, now = {0: beat(0), 1: beat(1)}, {0: beat(0, 9), 1: beat(1, 5 + LEAST_STEPS - 1)}
  assert slowest(then, now) is None
  assert slowest({0: beat(0)}, {0: beat(0, 50)}) is None


def test_a_straggler_is_named_when_it_is_slow_twice_and_once():
  straggler, slow, well = Straggler(), Pace(1, "h", 0.5, 2.0), Pace(0, "h", 0.2, 1.1)
  assert straggler.take(slow) == ""
  assert "process 1 on h is slow: its own part of a step takes 0.5 s, 2 times" in (
    straggler.take(slow)
  )
  assert straggler.take(slow) == "" and straggler.named == 1
  assert straggler.take(well) == "process 1 keeps pace again"
  assert straggler.take(slow) == "" and straggler.named is None
  assert straggler.take(Pace(0, "h", 0.5, 2.0)) == ""  # another one each time: noise


def test_what_the_driver_says_of_gpus():
  sound = "0, 31, 1980, 1980, 0x0000000000000000, 0\n"
  hot = "1, 91, 345, 1980, 0x0000000000000048, 0\n"
  broken = "2, 40, 1980, 1980, 0x0000000000000001, 3\n"
  unknown = "3, 40, 1980, 1980, 0x0000000000000000, [N/A]\n"
  assert faults("No devices were found\n") == []
  assert faults(sound + hot + broken + unknown) == [
    "GPU 1 at 91 C runs at 345 of 1980 MHz: hardware slowdown, too hot, by hardware",
    "GPU 2 has had 3 memory errors that could not be corrected",
  ]


def test_what_may_take_how_long(tmp_path):
  dog = Watchdog(Goodput(), tmp_path, 10.0)
  assert dog.limit("step") == dog.limit("data_wait") == 10.0
  assert dog.limit("compile") == dog.limit("checkpoint") == dog.limit(START) == PATIENCE * 10.0
  assert dog.limit(READING) is None
  assert Watchdog(Goodput(), tmp_path, 0.0).limit("step") is None


class Ticks:
  """Time as a watchdog sees it, and the event that ends its watch: each wait is a tick.

  Attributes:
    now: seconds.
    loop: what the loop of the run does, up to the next tick at each `yield`; the seconds that it
      yields pass while the process is stopped.
  """

  def __init__(self, loop):
    self.now, self.loop = 0.0, loop

  def monotonic(self):
    return self.now

  def monotonic_ns(self):
    return int(1e9 * self.now)

  def wait(self, period):
    try:
      self.now += period + (next(self.loop) or 0.0)
    except StopIteration:
      return True
    return False


def watched(monkeypatch, tmp_path, hang_secs, loop, step=0):
  """A watchdog that has watched `loop(goodput, dog)`."""
  goodput, ticks = Goodput(), Ticks(None)
  monkeypatch.setattr(watchdog.time, "monotonic", ticks.monotonic)
  monkeypatch.setattr(watchdog.time, "monotonic_ns", ticks.monotonic_ns)
  dog = Watchdog(goodput, tmp_path, hang_secs)
  dog.step, ticks.loop, dog._over = step, loop(goodput, dog), ticks
  dog._watch()
  return dog


def test_outside_a_job_the_stacks_are_written_once_and_the_run_goes_on(
  tmp_path, caplog, monkeypatch
):
  begun, held = threading.Event(), threading.Event()

  def loop(goodput, dog):
    def a_loader_that_never_answers():
      with goodput.timed("data_wait"):
        begun.set()
        held.wait()

    loader = threading.Thread(target=a_loader_that_never_answers)
    loader.start()
    begun.wait()
    yield from [0.0] * 50  # far more than the limit: a second report would be wrong
    held.set()
    loader.join()

  watched(monkeypatch, tmp_path, 0.2, loop, step=7)
  stacks = (tmp_path / "stacks.txt").read_text()
  assert "a_loader_that_never_answers" in stacks
  assert "hangs: step 7 (data_wait), unmoved for" in stacks
  assert stacks.count(" hangs: ") == 1
  assert sum("Its stacks are in" in line for line in caplog.messages) == 1


def test_a_loop_that_gets_on_or_was_stopped_is_left_alone(tmp_path, monkeypatch):
  """A process that was itself stopped, as by Ctrl-Z, blames nobody."""

  def loop(goodput, dog):
    for dog.step in range(30):
      with goodput.timed("step"):
        yield
        yield 100.0 if dog.step == 20 else 0.0
        yield

  watched(monkeypatch, tmp_path, 0.3, loop)
  assert not (tmp_path / "stacks.txt").exists()


def test_a_long_step_makes_the_next_ones_limit_longer(tmp_path, monkeypatch):
  def loop(goodput, dog):
    for dog.step in (1, 2, 3, 4):
      with goodput.timed("step"):
        yield from [0.0] * 3  # of 0.2 s
    yield

  dog = watched(monkeypatch, tmp_path, 1.0, loop)
  assert dog.limit("step") == pytest.approx(6.0)


JOB = """
import ctypes, pathlib, sys, threading
import jax
from ats_jax.config import base_config, from_config_dict
from ats_jax.cluster.liveness import watchdog
from ats_jax.metrics.goodput import Goodput
port, folder, how = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 1, 0)
config = base_config()
config.hang_secs = 0.5
watchdog.LAST_SECS = 1.0
goodput = Goodput()
with watchdog.open_watchdog(from_config_dict(config), goodput, pathlib.Path(folder)) as dog:
  dog.step = 3
  with goodput.timed("step"):
    if how == "waits":
      threading.Event().wait()
    ctypes.PyDLL(None).sleep(100)  # which lets no other thread of Python run
"""


@pytest.mark.parametrize(
  "how", ["waits", pytest.param("holds the interpreter", marks=pytest.mark.thorough)]
)
def test_in_a_job_a_process_that_hangs_ends(how, tmp_path):
  command = [sys.executable, "-c", JOB, free_port(), str(tmp_path), how]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert done.returncode == FAULT, done.stderr
  stacks = done.stderr if how != "waits" else Path(tmp_path, "stacks.txt").read_text()
  assert 'File "<string>", line ' in stacks and "Thread 0x" in stacks
