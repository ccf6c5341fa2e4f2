"""What is claimed, registered before the held-out seeds are run. Change it with a reason only."""

from typing import NamedTuple


class Threshold(NamedTuple):
  """One figure of the guarded arm.

  Attributes:
    must: what has to be reached; None = not claimed.
    goal: what is aimed at.
    more_is_better: the direction.
  """

  must: float | None
  goal: float
  more_is_better: bool = False


THRESHOLDS = {
  "mean recovered": Threshold(0.75, 0.88, more_is_better=True),
  "mean recovered, less that of the best baseline": Threshold(0.3, 0.3, more_is_better=True),
  "recovered, worst fault": Threshold(None, 0.65, more_is_better=True),
  "most that a fault is below the best baseline": Threshold(None, 0.05),
  "mean excess, nats": Threshold(0.06, 0.03),
  "max excess, nats": Threshold(0.25, 0.10),
  "diagnosis right, share of runs with one": Threshold(0.9, 0.97, more_is_better=True),
  "interventions undone, share": Threshold(None, 0.05),
  "calibration error of the confidence": Threshold(0.15, 0.08),
  "clean runs: loss against clip, nats": Threshold(0.002, 0.0),
  "clean runs: steps left out, share": Threshold(1e-3, 5e-4),
  "controls: rollbacks and rate cuts": Threshold(0, 0),
}
