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

# Of the audit. Worst is of all runs, mean is of a scenario's seeds.
MINORITY_OUT = "1. a minority: finite tokens left out, worst scenario, %"
MINORITY_LOSS = "1. a minority: a domain over clip, nats, worst"
MINORITY_ACTIONS = "1. a minority: rollbacks and cuts"
NOISE = "1. noise and shuffles: over clip with the same, nats, worst mean"
BIT = "2. a flipped bit: over clip with the same, nats, worst"
NAMED = "2. a flipped bit: named by tensor, share of runs that found one"
FOR_GOOD = "3. schedule x30 for good: over clip without, nats, mean"
BURST = "3. schedule x30 for 30 steps: over clip without, nats, mean"
FROM_0 = "3. schedule x30 from step 0: over clip without, nats, mean"
EQUAL = "4. controls where nothing fired: not bit for bit those of clip"
LONG = "4. 2,000 clean steps: looks with an action"
AUDITED = {
  MINORITY_OUT: Threshold(0.1, 0.0),
  MINORITY_LOSS: Threshold(0.02, 0.01),
  MINORITY_ACTIONS: Threshold(0, 0),
  NOISE: Threshold(0.0, 0.0),
  BIT: Threshold(0.02, 0.01),
  NAMED: Threshold(1.0, 1.0, more_is_better=True),
  FOR_GOOD: Threshold(0.15, 0.10),
  BURST: Threshold(0.09, 0.05),
  FROM_0: Threshold(0.15, 0.10),
  EQUAL: Threshold(0, 0),
  LONG: Threshold(0, 0),
}
