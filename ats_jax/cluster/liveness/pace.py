"""Which process keeps the others waiting, from the time that each spends on its own.

In a collective all wait for the last: a step takes equally long everywhere. What differs is the
time before it. So the pace of a process is its own time a step, plus the shortest time that any
spends in a step, where the one that comes last waits for nobody. A device that computes slowly is
not seen so: its process waits in the step as the others do.
"""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from ats_jax.cluster.liveness.beats import Beat

LEAST_STEPS = 3  # to judge from
SLOW = 1.2  # of the median of the others, twice in a row


class Pace(NamedTuple):
  """The slowest process of a stretch of steps.

  Attributes:
    rank: number of the process.
    host: name of its machine.
    secs: seconds a step that it spends itself, not in waiting for others.
    ratio: these over the median of the others'.
  """

  rank: int
  host: str
  secs: float
  ratio: float


def slowest(then: Mapping[int, Beat], now: Mapping[int, Beat]) -> Pace | None:
  """The slowest process between two times, None if too few steps were made to say.

  Args:
    then: the beats of all, of earlier.
    now: those of now.
  """
  both = [(then[rank], beat) for rank, beat in now.items() if rank in then]
  steps = [after.step - before.step for before, after in both]
  if len(both) < 2 or min(steps) < LEAST_STEPS:
    return None
  own = [(b.host_secs - a.host_secs) / n for (a, b), n in zip(both, steps, strict=True)]
  shared = min((b.step_secs - a.step_secs) / n for (a, b), n in zip(both, steps, strict=True))
  paces = [max(secs, 0.0) + shared for secs in own]
  last = max(range(len(paces)), key=paces.__getitem__)
  others = statistics.median(paces[:last] + paces[last + 1 :])
  beat = both[last][1]
  return Pace(beat.rank, beat.host, paces[last], paces[last] / max(others, 1e-9))


class Straggler:
  """Names a process once when it becomes slow, and once when it no longer is.

  Attributes:
    pace: pace of the slowest process in the last stretch.
  """

  def __init__(self):
    """Nobody is slow."""
    self.pace: Pace | None = None
    self._suspect: int | None = None
    self._named: int | None = None

  @property
  def named(self) -> int | None:
    """Who was slow twice in a row."""
    return self._named

  def take(self, pace: Pace) -> str:
    """Take in a stretch; what is to be said, or ""."""
    self.pace = pace
    slow = pace.rank if pace.ratio >= SLOW else None
    named = slow if slow == self._suspect else self._named
    if slow is None:
      named = None
    was, self._suspect, self._named = self._named, slow, named
    if named == was:
      return ""
    if named is None:
      return f"process {was} keeps pace again"
    return (
      f"process {pace.rank} on {pace.host} is slow: its own part of a step takes {pace.secs:.3g} "
      f"s, {pace.ratio:.2g} times the median of the others, which wait for it"
    )
