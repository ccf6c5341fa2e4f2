"""Ends a process that does not get on, so that whoever started the job starts all of it again.

Two threads beside the loop. One looks whether anything moves; it never waits for another process.
The other exchanges signs of life over the coordination service, and may wait for it for ever.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import jax
from absl import logging

from ats_jax.cluster.liveness.beats import OVER, READING, START, Beat, Roll, late_processes
from ats_jax.cluster.liveness.board import Board
from ats_jax.cluster.liveness.devices import gpu_faults
from ats_jax.cluster.liveness.pace import Straggler, slowest
from ats_jax.config import Config
from ats_jax.exits import FAULT, LEFT
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.watcher import Watcher
from ats_jax.store import paths
from ats_jax.store.paths import Path

# Training may pause so much longer than the longest pause so far before it counts as hanging.
LONGER = 10
# What is not a step may take so much longer: to compile, save, evaluate, begin.
PATIENCE = 12
STEP_PHASES = ("step", "data_wait", "other")
MAX_BEAT_SECS = 3.0
BEATS_OF_STRETCH = 10  # over which paces are compared
# After a process has found that the job hangs, all have seen it and written their stacks.
BEATS_TO_END = 3
LAST_SECS = 60.0  # and if not even this can be done, it ends so much later


def open_watchdog(cfg: Config, goodput: Goodput, folder: Path) -> "Watchdog":
  """That of this process; in a job it knows the others."""
  board = Board("ats_jax") if jax.distributed.is_initialized() else None
  return Watchdog(
    goodput, folder, cfg.hang_secs, board=board, rank=jax.process_index(),
    heartbeat_secs=cfg.heartbeat_secs,
  )  # fmt: skip


def file_name(process: int) -> str:
  """Of the stacks of a process, in its workdir."""
  return f"stacks.{process}.txt" if process else "stacks.txt"


class Watchdog(Watcher):
  """Watches the loop of this process, and the other processes of its job. A context manager.

  In a job, a process that hangs or is left alone writes the Python stacks of its threads into the
  workdir, tells the others, which do the same, and ends: with exit code 1 if it hangs itself, with
  69 if another process is to blame. Outside a job the stacks are written and a warning is logged,
  once; nothing is ended, as nobody would start it again.

  Time in which this process was itself stopped (Ctrl-Z, a laptop that sleeps) does not count.

  Attributes:
    step: the update that is being made.
  """

  def __init__(
    self,
    goodput: Goodput,
    folder: Path,
    hang_secs: float,
    *,
    board: Board | None = None,
    rank: int = 0,
    heartbeat_secs: float = 30.0,
  ):
    """Set what to watch.

    Args:
      goodput: what the loop does; whenever it changes, the loop gets on.
      folder: the workdir.
      hang_secs: for how long a step may do nothing, see `limit`; 0 = for ever.
      board: the exchange of beats in a job; None = this process is alone.
      rank: number of this process.
      heartbeat_secs: a process that says nothing for so long is taken for dead.
    """
    self.step = 0
    self._goodput, self._folder, self._hang_secs = goodput, folder, hang_secs
    self._board, self._rank, self._heartbeat_secs = board, rank, heartbeat_secs
    self._host = socket.gethostname()
    self._phase = START
    self._seen, self._since, self._longest = 0, time.monotonic(), 0.0
    self._beat_secs = min(MAX_BEAT_SECS, heartbeat_secs / 10)
    self._roll, self._straggler, self._stretch = Roll(), Straggler(), dict[int, Beat]()
    self._news, self._beats = "", 0  # what process 0 said last; how often it has read all beats
    self._slow, self._busy = False, False  # is this process slow; is any in no step
    self._heard = time.monotonic()  # when the board answered last
    self._ends, self._others_end = "", ""  # why this process ends; why others do
    self._over, self._now = threading.Event(), threading.Event()
    self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
    if board is not None:
      self._threads.append(threading.Thread(target=self._exchange, name="beats", daemon=True))

  def __enter__(self) -> Self:
    self._set_alarm()
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.take_error(kind, error, trace)
    self._phase = OVER
    self._over.set()
    self._now.set()
    for thread in self._threads:
      thread.join(timeout=self._beat_secs + 1.0)  # the board may not answer any more
    if self._board is not None:
      faulthandler.cancel_dump_traceback_later()

  def take_error(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    """Tell the others that this process fails; they would wait in vain."""
    del trace
    if kind is not None and not self._ends:
      line = (str(error).splitlines() or [""])[0]
      self._ends = f"process {self._rank} on {self._host} failed: {kind.__name__}: {line}"
      self._now.set()

  def before(self, step: int, state: Any) -> None:
    """Note which update is being made."""
    del state
    self.step = step

  @contextlib.contextmanager
  def during(self, phase: str) -> Iterator[None]:
    """Around a part of the start that has a name of its own."""
    before, self._phase = self._phase, phase
    try:
      yield
    finally:
      self._phase = before

  def limit(self, phase: str) -> float | None:
    """Seconds for which nothing may move; None = no limit.

    A step may take `hang_secs`, or ten times as long as any before it. To compile, save, evaluate
    and begin may take twelve times `hang_secs`. To read the text may take for ever.
    """
    if not self._hang_secs or phase in (READING, OVER):
      return None
    if phase in STEP_PHASES:
      return max(self._hang_secs, LONGER * self._longest)
    return PATIENCE * self._hang_secs

  def metrics(self) -> dict[str, float]:
    """The slowest process of the last stretch of steps; in process 0 of a job, once it is known."""
    pace = self._straggler.pace
    return {} if pace is None else {"hosts/slowest": pace.rank, "hosts/slowest_ratio": pace.ratio}

  def _place(self) -> str:
    has_begun = self.step > 0 or self._goodput.current != "other"
    return self._goodput.current if self._phase == START and has_begun else self._phase

  def _beat(self, now: float) -> Beat:
    totals = self._goodput.totals()
    return Beat(
      self._rank, self._host, time.monotonic_ns(), self._place(), self.step, now - self._since,
      totals["data_wait"] + totals["other"], totals["step"], self._ends,
    )  # fmt: skip

  def _watch(self) -> None:
    """Look whether anything moves."""
    period = min(1.0, self._beat_secs, (self._hang_secs or 1.0) / 5)
    last, warned = time.monotonic(), False
    while not self._over.wait(period):
      now = time.monotonic()
      stopped, last = now - last - period, now
      if stopped > max(1.0, 3 * period):  # this process was not running: nobody is to blame
        self._since, self._heard = self._since + stopped, now
        self._roll.forgive(now)
      if self._goodput.moves != self._seen:
        gap = now - self._since
        if self._place() in STEP_PHASES and self.step > 1:
          self._longest = max(self._longest, gap if self._seen else 0.0)
        self._seen, self._since, warned = self._goodput.moves, now, False
      if self._busy and self._place() in STEP_PHASES:
        self._since = now  # waiting for who compiles or saves is no fault
      self._set_alarm()
      hangs = "" if self._ends or self._others_end else self._hangs(now)
      reason = "" if self._ends else self._others_end
      # Also of a process that fails: to close, it may wait for others.
      why = reason or hangs or self._alone(now)
      if why and self._board is not None:
        self._end(why, FAULT if hangs else LEFT)
      elif why and not warned:
        logging.error("%s. Its stacks are in %s.", why, self._write_stacks(why))
        warned = True

  def _hangs(self, now: float) -> str:
    """Why this process hangs, or ""."""
    limit = self.limit(self._place())
    if limit is None or now - self._since <= limit:
      return ""
    return f"{self._beat(now).name} hangs: {self._beat(now).place}; {limit:.0f} s are allowed"

  def _alone(self, now: float) -> str:
    """Why this process has lost the others, or ""."""
    if self._board is None or self._place() in (READING, OVER):
      return ""
    if self._rank and now - self._heard > self._heartbeat_secs:
      return f"process 0 gives no sign of life for {self._heartbeat_secs:.0f} s"
    if not self._rank and (silent := self._roll.silent(self._heartbeat_secs, now)):
      return late_processes(self._roll.beats, silent)
    return ""

  def _set_alarm(self) -> None:
    """End this process even if a library that hangs lets no thread of Python run."""
    limit = self.limit(self._place())
    if self._board is None:
      return
    if limit is None:
      faulthandler.cancel_dump_traceback_later()
    else:
      faulthandler.dump_traceback_later(limit + LAST_SECS, exit=True)

  def _end(self, why: str, code: int) -> None:
    """Write the stacks, see that the others do, and end with an exit code."""
    if not self._rank and not self._roll.silent(self._heartbeat_secs, time.monotonic()):
      why = f"{why}; {late_processes(self._roll.beats)}"
    self._ends = why
    self._now.set()
    faulthandler.dump_traceback_later(LAST_SECS, exit=True)
    logging.error(
      "%s. This process ends, so that all can start again. The stacks of its threads are in %s",
      why, self._write_stacks(why),
    )  # fmt: skip
    time.sleep(BEATS_TO_END * self._beat_secs)
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

  def _write_stacks(self, why: str) -> str:
    """Put the stacks of all threads behind those of earlier; returns where they are."""
    path = self._folder / file_name(self._rank)
    with tempfile.TemporaryFile("w+") as file:
      faulthandler.dump_traceback(file, all_threads=True)
      file.seek(0)
      stacks = file.read()
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    heading = f"{at} {self._beat(time.monotonic()).name}: {self._place()}, step {self.step}\n{why}"
    try:
      before = paths.read(path).decode() if path.exists() else ""
      paths.write(path, f"{before}{heading}\n{stacks}\n")
    except paths.errors() as e:
      print(stacks, file=sys.stderr)
      return f"standard error, as {path} cannot be written: {paths.reason(e)}"
    return str(path)

  def _exchange(self) -> None:
    """Say that this process lives, and hear of the others."""
    while True:
      try:
        self._talk(time.monotonic())
        self._heard = time.monotonic()
      except ConnectionError as error:
        self._others_end = self._others_end or f"process 0 is gone ({error})"
      if self._over.is_set():
        return
      self._now.wait(self._beat_secs)
      self._now.clear()

  def _talk(self, now: float) -> None:
    board = self._board
    assert board is not None
    board.put(f"beat/{self._rank}", self._beat(now).to_json())
    if self._rank:
      self._hear(board.read("news"))
      return
    beats = {beat.rank: beat for beat in map(Beat.from_json, board.all("beat"))}
    self._roll.hear(beats, now)
    reason = next((beat.ends for beat in beats.values() if beat.ends and beat.rank), "")
    self._others_end = self._others_end or reason
    self._compare(beats)
    busy = any(beat.phase not in (*STEP_PHASES, OVER) for beat in beats.values())
    named = self._straggler.named
    news = json.dumps((self._ends or self._others_end, -1 if named is None else named, busy))
    if news != self._news:
      board.put("news", news)
      self._hear(news)

  def _hear(self, news: str) -> None:
    """Take in what process 0 says to all."""
    if not news or news == self._news:
      return
    self._news, was_slow = news, self._slow
    reason, slow, self._busy = json.loads(news)
    self._others_end, self._slow = self._others_end or reason, slow == self._rank
    if self._slow and not was_slow:  # not here: the driver may take longer than a sign of life
      threading.Thread(target=self._examine, name="health", daemon=True).start()

  def _examine(self) -> None:
    """Look for a cause of this process being slow."""
    if causes := gpu_faults():
      logging.warning("%s may be slow because: %s", self._beat(time.monotonic()).name, causes)

  def _compare(self, beats: Mapping[int, Beat]) -> None:
    """At the end of a stretch, see who is slow."""
    self._beats += 1
    if self._beats % BEATS_OF_STRETCH:
      return
    then, self._stretch = self._stretch, dict(beats)
    pace = slowest(then, beats)
    if pace is None:
      return
    if warning := self._straggler.take(pace):
      logging.warning("%s.", warning)
