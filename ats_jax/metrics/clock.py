"""How fast this process goes, by its own clock: for the ledger, never for a decision."""

from collections.abc import Callable, Mapping

Totals = Callable[[], Mapping[str, float]]
ASIDE = ("compile", "eval", "checkpoint", "sample")  # is no training


class Clock:
  """Laps of the loop, from totals of where its time went."""

  def __init__(self, totals: Totals | None):
    """Take `Goodput.summary`, or something that gives totals under the same names."""
    self._totals = totals
    self._last = None if totals is None else dict(totals())

  def lap(self, steps: int) -> dict[str, float]:
    """What the last `steps` steps took; empty without totals.

    Returns:
      host/step_secs; host/data_wait_share, of the time in which steps were made, spent waiting for
      batches.
    """
    if self._totals is None or self._last is None:
      return {}
    last, self._last = self._last, dict(self._totals())
    spent = {name: self._last[name] - last[name] for name in self._last}
    aside = sum(spent[f"goodput/{name}_secs"] for name in ASIDE)
    wall = max(spent["goodput/wall_secs"] - aside, 1e-9)
    waited, steps = spent["goodput/data_wait_secs"], max(steps, 1)
    return {"host/step_secs": wall / steps, "host/data_wait_share": waited / wall}
