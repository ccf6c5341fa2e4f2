"""What is claimed of `ours`, registered before the held-out seeds are run. Change it with a reason.

A cost is the held-out loss of an arm less that of a clean run of `clip`, nats, mean of the seeds.
"""

from typing import NamedTuple

LEAST_GAIN = 0.02  # nats over clip, on the tuning seeds: from there on a fault can be mended
HURTS = 0.01  # nats: from there on a domain of a healthy run has lost something


class Threshold(NamedTuple):
  """The most that a figure may be; with `below`, less than that."""

  most: float
  below: bool = False

  def is_met(self, value: float) -> bool:
    """Whether a figure is as claimed."""
    return value < self.most if self.below else value <= self.most


THRESHOLDS = {
  "healthy: runs with a rollback and a domain 0.01 over clip": Threshold(0),
  "healthy: runs with a lower rate": Threshold(0),
  "healthy: tokens left out, %": Threshold(0.1, below=True),
  "healthy: looks with a finding, %": Threshold(2.0, below=True),
  "healthy: nothing fired, but not bit-equal to clip, runs": Threshold(0),
  "faults that can be mended: mean cost over that of the best single baseline": Threshold(0.5),
  "other faults: cost over clip, worst": Threshold(0.01),
  "all faults: cost over the best baseline of that fault, worst": Threshold(0.02),
}
