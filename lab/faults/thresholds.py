"""What is claimed of `ours`, registered before the held-out seeds are run. Change it with a reason.

A cost is the held-out loss of an arm less that of a clean run of `clip`, nats, mean of the seeds.
"""

LEAST_GAIN = 0.02  # nats over clip, on the tuning seeds: from there on a fault can be mended
HURTS = 0.01  # nats: from there on a domain of a healthy run has lost something
# The most that a figure may be; of a share, less than that.
THRESHOLDS = {
  "healthy: runs with a rollback and a domain 0.01 over clip": 0,
  "healthy: runs with a lower rate": 0,
  "healthy: batches left out, %": 0.1,
  "healthy: looks with a finding, %": 2.0,
  "healthy: nothing fired, but not bit-equal to clip, runs": 0,
  "faults that can be mended: mean cost over that of the best single baseline": 0.5,
  "other faults: cost over clip, worst": 0.01,
  "all faults: cost over the best baseline of that fault, worst": 0.02,
}
# Of `long_clean`, `long_faults` and `larger_faults`, runs on a GPU, where equal programs
# differ by rounding too.
AWAY = "clean runs: away from clip, nats, worst"
THRESHOLDS_ON_GPU = {AWAY: 0.01} | {
  name: most for name, most in THRESHOLDS.items() if "bit-equal" not in name
}
LONG = 1000  # steps: from there on a run is one of these
