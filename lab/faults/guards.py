"""Guards on the host: the protocol for other people's, and what others do, as published."""

import importlib
import math
from collections import deque
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np

# "skip" takes the step just observed back. "rollback" takes a state from 20 steps or a little more
# ago, ("rollback", n) from at least n; the batches since then are lost. ("rate", factor) multiplies
# the schedule's rate from the next step on, until another one.
Decision = Literal["continue", "skip", "rollback"] | tuple[Literal["rate", "rollback"], float]
IN_A_ROW, CALM = 3, 50  # rollbacks that did not help; steps after which the next is the first again
LEFT_OUT_IN_A_ROW = 10  # steps, after which one is taken, or the run goes back


class Guard(Protocol):
  """A way to guard a run; `copy.deepcopy` must be able to copy one."""

  def observe(self, step: int, metrics: Mapping[str, float], probe: float | None) -> None:
    """Take in a step.

    Args:
      step: steps done (1-based), whatever became of them.
      metrics: train/loss, train/grad_norm, train/param_norm (after the step) and the others of
        docs/reference/metrics.md.
      probe: loss on held-out rows after the step, nats; None = it was not scored.
    """
    ...

  def decide(self) -> Decision:
    """What becomes of the run after the step just observed."""
    ...


def load(name: str) -> type[Guard]:
  """The guard `module:Class`.

  Raises:
    ValueError: if there is none.
  """
  module, _, kind = name.partition(":")
  try:
    found = getattr(importlib.import_module(module), kind)
  except (ImportError, AttributeError, ValueError) as e:
    raise ValueError(
      f"--guard={name} cannot be imported ({e}). Give module:Class, with its folder in PYTHONPATH."
    ) from e
  if missing := [method for method in ("observe", "decide") if not hasattr(found, method)]:
    raise ValueError(f"--guard={name} has no method {missing[0]}. See docs/lab/faults.md.")
  return found


class _Rule:
  """A guard that judges each step by itself."""

  def __init__(self):
    self._decision: Decision = "continue"

  def observe(self, step: int, metrics: Mapping[str, float], probe: float | None) -> None:
    """See `Guard`."""
    del probe
    names = ("train/loss", "train/grad_norm", "train/param_norm")
    self._decision = self._judge(step, *(metrics[name] for name in names))

  def decide(self) -> Decision:
    """See `Guard`."""
    return self._decision

  def _judge(self, step: int, loss: float, grad_norm: float, param_norm: float) -> Decision:
    raise NotImplementedError


class SkipStep(_Rule):
  """Leaves a step out if loss or gradient norm is 6 sigmas off the mean of the last 128 steps.

  OLMo-core's `SkipStepOptimizer` (github.com/allenai/OLMo-core; Levanter and MaxText have it too),
  made two-sided and safe for NaN: values that are not finite never enter the window, and their
  steps are always left out. Nothing else is before half a window is seen. After
  `LEFT_OUT_IN_A_ROW` steps one is taken.
  """

  LENGTH, SIGMAS = 128, 6.0

  def __init__(self):
    super().__init__()
    self._window, self._left_out = deque[tuple[float, float]](maxlen=self.LENGTH), 0

  def _judge(self, step: int, loss: float, grad_norm: float, param_norm: float) -> Decision:
    new, skip = (loss, grad_norm), False
    if not np.isfinite(new).all():
      return "skip"
    if len(self._window) >= self.LENGTH // 2:
      seen = np.array(self._window)
      off = np.abs(new - seen.mean(axis=0)) > self.SIGMAS * seen.std(axis=0, ddof=1)
      skip = bool(off.any()) and self._left_out < LEFT_OUT_IN_A_ROW
    self._left_out = self._left_out + 1 if skip else 0
    self._window.append(new)
    return "skip" if skip else "continue"


class _GoesBack(_Rule):
  """A rule that may go back, `IN_A_ROW` times without success.

  A step that is not finite is left out; after `LEFT_OUT_IN_A_ROW` of them the state is taken to be
  broken, and the run goes back.
  """

  LENGTH: int

  def __init__(self):
    super().__init__()
    self._losses = deque[float](maxlen=self.LENGTH)
    self._rollbacks, self._last, self._broken = 0, -CALM, 0

  def _judge(self, step: int, loss: float, grad_norm: float, param_norm: float) -> Decision:
    if np.isfinite([loss, grad_norm, param_norm]).all():
      self._broken = 0
      return self._judge_finite(step, loss)
    self._broken += 1
    back = self._broken > LEFT_OUT_IN_A_ROW and self._may_go_back(step)
    return "rollback" if back else "skip"

  def _may_go_back(self, step: int) -> bool:
    """Whether the run may go back now, which it then does."""
    self._rollbacks = 0 if step - self._last >= CALM else self._rollbacks
    if self._rollbacks == IN_A_ROW:
      return False
    self._rollbacks, self._last, self._broken = self._rollbacks + 1, step, 0
    self._losses.clear()
    return True

  def _judge_finite(self, step: int, loss: float) -> Decision:
    raise NotImplementedError


class Rewind(_GoesBack):
  """Goes back when the loss stands high, and leaves out the batches since then.

  As PaLM (arXiv:2204.02311, section 5.1) and GLM-130B (arXiv:2210.02414) did by hand. Looks each 10
  steps at the median of the newest 10 losses against that of up to 50 before: 0.25 nats and 3 of
  their sigmas above it, the run goes back.
  """

  LENGTH, EVERY, NEWEST, LEAST, RISE, SIGMAS = 60, 10, 10, 30, 0.25, 3.0

  def _judge_finite(self, step: int, loss: float) -> Decision:
    self._losses.append(loss)
    losses = np.array(self._losses)
    before, newest = losses[: -self.NEWEST], losses[-self.NEWEST :]
    if step % self.EVERY or len(before) < self.LEAST:
      return "continue"
    rise = np.median(newest) - np.median(before)
    is_high = rise > max(self.RISE, self.SIGMAS * np.std(before))
    return "rollback" if is_high and self._may_go_back(step) else "continue"


class EmaRollback(_GoesBack):
  """Goes back when the loss is 3 times its exponential average.

  The rule of Lightning's `SpikeDetection` callback (a running mean and a factor; its default is 2),
  with a rollback in place of its stop.
  """

  LENGTH, DECAY, FACTOR, WARMUP = 1, 0.95, 3.0, 20

  def __init__(self):
    super().__init__()
    self._mean, self._seen = 0.0, 0

  def _judge_finite(self, step: int, loss: float) -> Decision:
    if self._seen >= self.WARMUP and loss > self.FACTOR * self._mean:
      return "rollback" if self._may_go_back(step) else "continue"
    self._mean = self.DECAY * self._mean + (1.0 - self.DECAY) * loss if self._seen else loss
    self._seen += 1
    return "continue"


class ZscoreLadder(_GoesBack):
  """Lowers the rate, leaves the step out, or goes back, the farther off the loss is.

  By its z-score over the last 50 losses that were taken: above 3 half the rate for 10 steps, above
  4 the step is left out, above 6 the run goes back. The escalating recovery (leave out, lower the
  rate, roll back) of The School of AI's trainer (github.com/The-School-of-AI/LLM), by the score in
  place of the number of spikes.
  """

  LENGTH, LEAST, SLOW, SKIP, BACK, FACTOR, HELD = 50, 30, 3.0, 4.0, 6.0, 0.5, 10

  def __init__(self):
    super().__init__()
    self._slow_until, self._left_out = math.inf, 0

  def _judge_finite(self, step: int, loss: float) -> Decision:
    losses, z = np.array(self._losses), 0.0
    if losses.size >= self.LEAST:
      z = (loss - losses.mean()) / max(float(losses.std(ddof=1)), 1e-6)
    if z > self.BACK and self._may_go_back(step):
      return "rollback"
    if z > self.SKIP and self._left_out < LEFT_OUT_IN_A_ROW:
      self._left_out += 1
      return "skip"
    self._left_out = 0
    self._losses.append(loss)
    if z > self.SLOW:
      self._slow_until = step + self.HELD
      return "rate", self.FACTOR
    if step < self._slow_until:
      return "continue"
    self._slow_until = math.inf
    return "rate", 1.0


class Restart(_Rule):
  """Stops at the first loss or weight that is not finite, and goes on from the last checkpoint.

  What a launcher does with a trainer that checks for NaN, as torchrun's restarts of a failed
  worker, 3 times. Checkpoints are 100 steps apart.
  """

  EVERY = 100

  def __init__(self):
    super().__init__()
    self._restarts = 0

  def _judge(self, step: int, loss: float, grad_norm: float, param_norm: float) -> Decision:
    if np.isfinite([loss, param_norm]).all() or self._restarts == IN_A_ROW:
      return "continue"
    self._restarts += 1
    return "rollback", (step - 1) % self.EVERY + 1
