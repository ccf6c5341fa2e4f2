"""What a process of a job says of itself every few seconds, and what follows from what all say."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Self

# Phases beside those of `metrics.goodput`: before the first step; reading the text, which may take
# hours; after the last step.
# Phases of a process that are no parts of the loop.
START = "start"
READING = "reading the text"
OVER = "over"
# A process that waits for others in a collective is in the step that they have not begun.
_ORDER = (START, READING, "compile", "data_wait", "other", "step", "checkpoint", "eval", "sample")


@dataclasses.dataclass(frozen=True)
class Beat:
  """A sign of life.

  Attributes:
    rank: number of the process.
    host: name of its machine.
    count: number of its beats so far; one that stays the same is no sign of life.
    phase: what its loop is busy with.
    step: the update that it makes, or made last.
    still_secs: for how long nothing has moved.
    host_secs: what its loop spent so far on its own part of steps: waiting for data, and between.
    step_secs: what it spent in steps, where it also waits for others.
    ends: why it ends; "" = it does not.
  """

  rank: int
  host: str
  count: int
  phase: str
  step: int
  still_secs: float = 0.0
  host_secs: float = 0.0
  step_secs: float = 0.0
  ends: str = ""

  def to_json(self) -> str:
    """Return the beat as JSON."""
    return json.dumps(dataclasses.astuple(self))

  @classmethod
  def from_json(cls, text: str) -> Self:
    """What `to_json` gave."""
    return cls(*json.loads(text))

  @property
  def name(self) -> str:
    """Which process, in words."""
    return f"process {self.rank} on {self.host}"

  @property
  def place(self) -> str:
    """Where it is, in words."""
    where = f"step {self.step}" if self.step else "the start"
    return f"{where} ({self.phase}), unmoved for {self.still_secs:.0f} s"


class Roll:
  """When each process was heard of last, by this process's clock."""

  def __init__(self):
    """Nobody was heard of."""
    self.beats = dict[int, Beat]()
    self._heard = dict[int, float]()

  def hear(self, beats: Mapping[int, Beat], now: float) -> None:
    """Take in what was read at time `now`; a beat that was read before is nothing new."""
    for rank, beat in beats.items():
      known = self.beats.get(rank)
      if known is None or known.count != beat.count:
        self._heard[rank] = now
      self.beats[rank] = beat

  def silent(self, secs: float, now: float) -> list[int]:
    """Processes of which nothing new was heard for `secs`.

    One that reads text may be busy in a library that lets no other thread run, and one whose run is
    over has nothing to say.
    """
    old = (rank for rank, heard in self._heard.items() if now - heard > secs)
    return sorted(rank for rank in old if self.beats[rank].phase not in (READING, OVER))

  def forgive(self, now: float) -> None:
    """Begin to count anew: this process itself was not running."""
    self._heard = dict.fromkeys(self._heard, now)


def late_processes(beats: Mapping[int, Beat], silent: Collection[int] = ()) -> str:
  """Say which processes keep the others waiting, and in which phase of the loop each of them is.

  Args:
    beats: the last of each process.
    silent: numbers of the processes that give no sign of life.
  """
  if silent:
    last = "; ".join(f"{beats[rank].name}, last heard of in {beats[rank].place}" for rank in silent)
    return f"without a sign of life: {last}"
  if len(beats) == 1:
    return f"it is in {next(iter(beats.values())).place}"
  order = lambda beat: (beat.step, _ORDER.index(beat.phase))
  live = [beat for beat in beats.values() if beat.phase != OVER]
  first = min(map(order, live), default=(0, 0))
  late = [beat for beat in live if order(beat) == first]
  if len(late) == len(live):
    return f"all are in the same place, {late[0].place}: a collective, a device or the network"
  return f"behind: {'; '.join(f'{beat.name} in {beat.place}' for beat in late)}"
