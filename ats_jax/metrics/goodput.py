"""Where the wall time of a run goes: every moment belongs to exactly one category."""

import time
from collections.abc import Callable

from ats_jax.metrics.watcher import Watcher

CATEGORIES = ("compile", "data_wait", "step", "checkpoint", "eval", "sample")


class _Timed:
  """The context manager of one category; it holds no state of its own, so it is made once."""

  __slots__ = ("_goodput", "_name")

  def __init__(self, goodput: "Goodput", name: str):
    self._goodput = goodput
    self._name = name

  def __enter__(self) -> None:
    self._goodput._push(self._name)

  def __exit__(self, *exc: object) -> None:
    self._goodput._pop()


class Goodput(Watcher):
  """Splits the time since construction into `CATEGORIES` and "other".

  ```
  goodput = Goodput()
  with goodput.timed("data_wait"):
    batch = next(batches)
  ```

  Categories may nest: the inner one takes its time from the outer one, so the totals add up to the
  wall time. For use from one thread. Host time is measured: what the device does in the background
  shows where the host waits for it.

  Attributes:
    moves: goes up whenever anything here is called: a loop that gets on is seen by it.
    current: the category of this moment.
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._totals: dict[str, float] = dict.fromkeys((*CATEGORIES, "other"), 0.0)
    self._timers = {name: _Timed(self, name) for name in CATEGORIES}
    self.moves = 0
    self.current = "other"
    self._outer: list[str] = []
    self._since = clock()

  def timed(self, name: str) -> _Timed:
    """Returns a context manager whose time goes to `name`.

    Raises:
      ValueError: `name` is not one of `CATEGORIES`.
    """
    timer = self._timers.get(name)
    if timer is None:
      raise ValueError(f"goodput: unknown category {name!r}; legal are {', '.join(CATEGORIES)}")
    return timer

  def pause(self, step: int, name: str) -> _Timed:
    """Count the time under `name`, as `timed`."""
    del step
    return self.timed(name)

  def _settle(self) -> None:
    now = self._clock()
    self.moves += 1
    self._totals[self.current] += now - self._since
    self._since = now

  def _push(self, name: str) -> None:
    self._settle()
    self._outer.append(self.current)
    self.current = name

  def _pop(self) -> None:
    self._settle()
    self.current = self._outer.pop()

  def marking[**P, T](self, fn: Callable[P, T]) -> Callable[P, T]:
    """`fn`, each call of which counts as getting on."""

    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
      self.moves += 1
      return fn(*args, **kwargs)

    return marked

  def totals(self) -> dict[str, float]:
    """Seconds of each category up to the last change: for other threads."""
    return dict(self._totals)

  def summary(self) -> dict[str, float]:
    """Returns `goodput/<name>_secs`, its share of the wall time, and `goodput/wall_secs`."""
    self._settle()
    wall = sum(self._totals.values())
    metrics = {"goodput/wall_secs": wall}
    for name, secs in self._totals.items():
      metrics[f"goodput/{name}_secs"] = secs
      metrics[f"goodput/{name}_share"] = secs / wall if wall > 0 else 0.0
    return metrics

  def line(self) -> str:
    """Returns one line for the log, largest share first; categories without time are left out."""
    wall = self.summary()["goodput/wall_secs"]
    parts = sorted(self._totals.items(), key=lambda item: -item[1])
    shares = [f"{name} {secs / wall:.1%} ({secs:.1f}s)" for name, secs in parts if secs > 0]
    return f"{wall:.1f}s of wall time: {', '.join(shares)}"
