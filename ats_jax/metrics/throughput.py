"""Tokens and steps a second, and the share of the hardware's peak they amount to (MFU)."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ats_jax.metrics.watcher import Watcher


def mfu(
  flops_per_token: float, tokens_per_sec: float, num_devices: int, peak: float | None
) -> float | None:
  """Returns model FLOP/s as a share (0 to 1) of all devices' peak, or None without a peak."""
  return None if peak is None else flops_per_token * tokens_per_sec / (num_devices * peak)


class Throughput(Watcher):
  """Speed over the last logging interval, by the host's monotonic clock.

  Call `start` when steps begin to run back to back (after the first step has compiled, after an
  evaluation or a checkpoint), and `read` for each step that is logged: an interval ends and the
  next begins there. The time must be that at which the step was done on the device, which is not
  when it was dispatched.
  """

  def __init__(
    self,
    *,
    num_devices: int,
    peak: float | None,
    rows_per_step: int,
    tokens_per_step: int,
    flops_per_token: Mapping[str, float],
    clock: Callable[[], float] = time.monotonic,
  ):
    """Sets what MFU is relative to.

    Args:
      num_devices: devices that share the work.
      peak: FLOP/s of one of them (`metrics.peaks`); None leaves MFU out.
      rows_per_step: rows of a batch, which are its samples.
      tokens_per_step: positions that a step processes over all devices, padding included.
      flops_per_token: forward and backward FLOPs under each convention, by the name of its metric:
        {"train/mfu": causal, no input embedding, active parameters; "train/mfu_6n": 6N + 12LdS}.
        The first one's are those of `train/tflops_per_device`.
      clock: seconds.
    """
    self._num_devices = num_devices
    self._peak = peak
    self._flops_per_token = dict(flops_per_token)
    self._clock = clock
    self._rows_per_step, self._tokens_per_step = rows_per_step, tokens_per_step
    self._taken: dict[int, Mapping[str, float]] = {}  # FLOPs per token of steps not read yet
    self._start: tuple[int, float] | None = None
    # Of each interval: its steps and seconds, and the sum of its steps' FLOPs per token.
    self._intervals: list[tuple[int, float, Mapping[str, float]]] = []

  def start(self, step: int, now: float | None = None) -> None:
    """Begins an interval with `step` done, now or at another time of the clock."""
    self._start = (step, self._clock() if now is None else now)

  def took(self, step: int, flops_per_token: Mapping[str, float]) -> None:
    """Notes the FLOPs of a step, by the names given at first, where they are not those of all."""
    self._taken[step] = flops_per_token

  @contextlib.contextmanager
  def pause(self, step: int, name: str) -> Iterator[None]:
    """Leave the time out: the next interval begins when the pause ends."""
    del name
    yield
    self.start(step)

  def read(self, step: int, now: float | None = None) -> dict[str, float]:
    """Ends the interval and begins the next; empty if there is none or no step ran in it."""
    if self._start is None or step <= self._start[0]:
      self.start(step, now)
      return {}
    first_step, began = self._start
    self.start(step, now)
    steps = range(first_step + 1, step + 1)
    taken = [self._taken.get(number, self._flops_per_token) for number in steps]
    self._taken = {number: flops for number, flops in self._taken.items() if number > step}
    flops = {name: sum(of_step[name] for of_step in taken) for name in self._flops_per_token}
    self._intervals.append((len(steps), max(self._start[1] - began, 1e-9), flops))
    return self._speed(*self._intervals[-1])

  def summary(self) -> dict[str, float]:
    """Speed over all intervals, and `train/step_secs_p50`, `..._p90` and `..._max` of their means.

    Empty if there was none.
    """
    if not self._intervals:
      return {}
    steps, secs = np.array([interval[:2] for interval in self._intervals]).T
    flops = {
      name: sum(of_interval[name] for _, _, of_interval in self._intervals)
      for name in self._flops_per_token
    }
    p50, p90, most = np.percentile(secs / steps, (50, 90, 100)).tolist()
    percentiles = {"p50": p50, "p90": p90, "max": most}
    return {
      **self._speed(steps.sum().item(), secs.sum().item(), flops),
      **{f"train/step_secs_{name}": value for name, value in percentiles.items()},
    }

  def _speed(self, steps: float, secs: float, sums: Mapping[str, float]) -> dict[str, float]:
    tokens_per_sec = steps / secs * self._tokens_per_step
    metrics = {
      "train/tokens_per_sec": tokens_per_sec,
      "train/samples_per_sec": steps / secs * self._rows_per_step,
      "train/steps_per_sec": steps / secs,
    }
    per_token = {name: total / steps for name, total in sums.items()}  # steps have equal tokens
    if per_token:
      flops = next(iter(per_token.values()))
      metrics["train/tflops_per_device"] = flops * tokens_per_sec / self._num_devices / 1e12
    for name, flops in per_token.items():
      share = mfu(flops, tokens_per_sec, self._num_devices, self._peak)
      if share is not None:
        metrics[name] = share
    return metrics
