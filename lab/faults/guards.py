"""Guards on the host: the protocol for other people's, and what others do, as published."""

import abc
import math
import pydoc
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

# "skip" takes the step just observed back, "repeat" makes it again. "rollback" takes a state from
# 20 steps or a little more ago, ("rollback", n) from at least n; the batches since then are lost.
# ("rate", factor) multiplies the schedule's rate from the next step on, until another one.
Decision = (
  Literal["continue", "skip", "repeat", "rollback"] | tuple[Literal["rate", "rollback"], float]
)
IN_A_ROW, CALM = 3, 50  # rollbacks that did not help; steps after which the next is the first again
LEFT_OUT = 10  # finite steps in a row, after which one is taken


class Guard(Protocol):
  """A way to guard a run; `copy.deepcopy` must be able to copy one."""

  def observe(self, step: int, metrics: Mapping[str, float], probe: float | None) -> None:
    """Take in a step (1-based), its metrics, and the loss on held-out rows after it if scored."""
    ...

  def decide(self) -> Decision:
    """What becomes of the run after the step just observed."""
    ...


def load(name: str) -> type[Guard]:
  """The guard `module:Class`.

  Raises:
    ValueError: if there is none.
  """
  found: Any = pydoc.locate(name.replace(":", "."))
  if not (hasattr(found, "observe") and hasattr(found, "decide")):
    raise ValueError(
      f"--guard={name} is no class with `observe` and `decide`. Give module:Class, with its folder "
      "in PYTHONPATH; docs/lab/faults.md has an example."
    )
  return found


class _Rule(abc.ABC):
  """A guard that judges each step, leaves it out if it is not finite, and may go back.

  After `PATIENCE` steps in a row that are not finite the state is taken to be broken, and the run
  goes back, `IN_A_ROW` times without success.
  """

  LENGTH, PATIENCE = 1, 10

  def __init__(self):
    self._decision: Decision = "continue"
    self._seen = deque[tuple[float, float]](maxlen=self.LENGTH)  # losses and gradient norms
    self._rollbacks, self._last, self._broken, self._left_out = 0, -CALM, 0, 0

  def observe(self, step: int, metrics: Mapping[str, float], probe: float | None) -> None:
    """See `Guard`."""
    loss, norm, weights = (metrics[f"train/{name}"] for name in ("loss", "grad_norm", "param_norm"))
    if np.isfinite([loss, norm, weights]).all():
      self._broken = 0
      self._decision = self._judge(step, loss, norm)
    else:
      self._broken += 1
      back = self._broken > self.PATIENCE and self._may_go_back(step)
      self._decision = "rollback" if back else "skip"

  def decide(self) -> Decision:
    """See `Guard`."""
    return self._decision

  @abc.abstractmethod
  def _judge(self, step: int, loss: float, norm: float) -> Decision:
    """What follows from a step whose numbers are finite."""

  def _may_leave_out(self, wants: bool) -> bool:
    """Whether a step may be left out, which it then is: `LEFT_OUT` in a row, and one is taken."""
    self._left_out = self._left_out + 1 if wants and self._left_out < LEFT_OUT else 0
    return self._left_out > 0

  def _may_go_back(self, step: int) -> bool:
    """Whether the run may go back, which it then does."""
    self._rollbacks = 0 if step - self._last >= CALM else self._rollbacks
    if self._rollbacks == IN_A_ROW:
      return False
    self._rollbacks, self._last, self._broken = self._rollbacks + 1, step, 0
    self._seen.clear()
    return True


class SkipStep(_Rule):
  """Leaves a step out if loss or gradient norm is 6 sigmas off the mean of the last 128 steps.

  OLMo-core's `SkipStepOptimizer` (github.com/allenai/OLMo-core; Levanter and MaxText have it too),
  made two-sided and safe for NaN: values that are not finite never enter the window. Nothing
  finite is left out before half a window is seen.
  """

  LENGTH, SIGMAS, PATIENCE = 128, 6.0, math.inf

  def _judge(self, step: int, loss: float, norm: float) -> Decision:
    is_off = False
    if len(self._seen) >= self.LENGTH // 2:
      seen = np.array(self._seen)
      off = np.abs(np.array((loss, norm)) - seen.mean(axis=0))
      is_off = bool(np.any(off > self.SIGMAS * seen.std(axis=0, ddof=1)))
    self._seen.append((loss, norm))
    return "skip" if self._may_leave_out(is_off) else "continue"


class RepeatStep(SkipStep):
  """Makes a step again where `SkipStep` would leave it out, and takes what comes of that.

  What Altenbernd et al. (arXiv:2604.00726) do against computations that are wrong at times; by this
  suite's rule for what stands out.
  """

  def decide(self) -> Decision:
    """See `Guard`."""
    return "repeat" if self._decision == "skip" else self._decision


class Rewind(_Rule):
  """Goes back when the loss stands high, and leaves out the batches since then.

  As PaLM (arXiv:2204.02311, section 5.1) and GLM-130B (arXiv:2210.02414) did by hand. Looks each 10
  steps at the median of the newest 10 losses against that of up to 50 before: 0.25 nats and 3 of
  their sigmas above it, the run goes back.
  """

  LENGTH, EVERY, NEWEST, LEAST, RISE, SIGMAS = 60, 10, 10, 30, 0.25, 3.0

  def _judge(self, step: int, loss: float, norm: float) -> Decision:
    self._seen.append((loss, norm))
    losses = np.array(self._seen)[:, 0]
    before, newest = losses[: -self.NEWEST], losses[-self.NEWEST :]
    if step % self.EVERY or len(before) < self.LEAST:
      return "continue"
    rise = np.median(newest) - np.median(before)
    is_high = rise > max(self.RISE, self.SIGMAS * np.std(before))
    return "rollback" if is_high and self._may_go_back(step) else "continue"


class EmaRollback(_Rule):
  """Goes back when the loss is 3 times its exponential average.

  The rule of Lightning's `SpikeDetection` callback (a running mean and a factor; its default is 2),
  with a rollback in place of its stop.
  """

  DECAY, FACTOR = 0.95, 3.0
  mean: float | None = None

  def _judge(self, step: int, loss: float, norm: float) -> Decision:
    if self.mean is not None and loss > self.FACTOR * self.mean:
      return "rollback" if self._may_go_back(step) else "continue"
    self.mean = loss if self.mean is None else self.DECAY * self.mean + (1.0 - self.DECAY) * loss
    return "continue"


class ZscoreLadder(_Rule):
  """Lowers the rate, leaves the step out, or goes back, the farther off the loss is.

  By its z-score over the last 50 losses that were taken: above 3 half the rate for 10 steps, above
  4 the step is left out, above 6 the run goes back. The escalating recovery (leave out, lower the
  rate, roll back) of The School of AI's trainer (github.com/The-School-of-AI/LLM), by the score in
  place of the number of spikes.
  """

  LENGTH, LEAST, SLOW, SKIP, BACK, FACTOR, HELD = 50, 30, 3.0, 4.0, 6.0, 0.5, 10
  slow_until = math.inf

  def _judge(self, step: int, loss: float, norm: float) -> Decision:
    z = 0.0
    if len(self._seen) >= self.LEAST:
      losses = np.array(self._seen)[:, 0]
      z = (loss - losses.mean()) / max(float(losses.std(ddof=1)), 1e-6)
    if z > self.BACK and self._may_go_back(step):
      return "rollback"
    if self._may_leave_out(z > self.SKIP):
      return "skip"
    self._seen.append((loss, norm))
    if z > self.SLOW:
      self.slow_until = step + self.HELD
      return "rate", self.FACTOR
    if step < self.slow_until:
      return "continue"
    self.slow_until = math.inf
    return "rate", 1.0


class Restart:
  """Stops at the first loss or weight that is not finite, and goes on from the last checkpoint.

  What a launcher does with a trainer that checks for NaN, as torchrun's `--max-restarts=3`.
  Checkpoints are 100 steps apart.
  """

  EVERY, MOST = 100, 3
  restarts, steps = 0, 0

  def observe(self, step: int, metrics: Mapping[str, float], probe: float | None) -> None:
    """See `Guard`."""
    sound = np.isfinite([metrics["train/loss"], metrics["train/param_norm"]]).all()
    stops = not sound and self.restarts < self.MOST
    self.restarts, self.steps = self.restarts + stops, stops * ((step - 1) % self.EVERY + 1)

  def decide(self) -> Decision:
    """See `Guard`."""
    return ("rollback", self.steps) if self.steps else "continue"
