"""Actions for the loop: go back to an earlier state, save a checkpoint, end the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.base import Action, Host, Memory
from ats_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Rollback(Action):
  """Take weights, moments and statistics from a snapshot; the data is not rewound.

  Nothing undoes it: what it leaves was found bad.

  Attributes:
    back: 0 for the newest snapshot that was found good, 1 for the one before it.
  """

  prior = (7.2, 0.8)
  cooldown = 3
  edits = True
  can_be_tried = False
  needs_saved = True

  back: int = 0

  def find(
    self, host: Host, step: int, state: TrainState
  ) -> tuple[TrainState | None, dict[str, Any]]:
    """A good earlier state, with the scalars of `state` and its limit on the rate.

    Its step is the host's count of batches consumed, because the count in `state` may be corrupt.
    """
    if (snapshot := host.earlier(self.back)) is None:
      return None, {}
    to, earlier = snapshot
    batches = jnp.full_like(state.step, step)
    earlier = dataclasses.replace(earlier, step=batches, control=state.control)
    if earlier.reflex is not None and state.reflex is not None:
      earlier = dataclasses.replace(earlier, reflex=earlier.reflex.allow_rate(state.reflex.rate))
    return earlier, {"to": to}

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Return the state that `find` gave."""
    assert saved is not None, "nothing to go back to"
    return saved

  def remember[M: Memory](self, policy: M, step: int, *, wanted: bool) -> M:
    """Ignore steps before it: they say nothing about this state."""
    return policy._replace(acted_step=step)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Say how far back it goes and what that costs, once known."""
    if "to" not in row:
      return "rolls back"
    lost = row["lost"]
    took = f", {float(lost['secs']):,.0f} s" if lost["secs"] is not None else ""
    cost = f"{lost['steps']:,} steps, {lost['tokens']:,} tokens{took}"
    return f"rolls back to step {row['to']:,}, which costs {cost}"


@dataclasses.dataclass(frozen=True)
class CorrectStep(Action):
  """Set the count of updates in the state, which the schedule goes by, to that of the loop.

  Attributes:
    step: updates done.
  """

  words = "sets the state's count of updates to {step:,}"
  judged = False
  can_be_tried = False

  step: int

  @property
  def can_be_asked_for(self) -> bool:
    """Hooks may not: only the policy has a reason to."""
    return False

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Nothing else changes."""
    return dataclasses.replace(state, step=jnp.full_like(state.step, self.step))

  def remember[M: Memory](self, policy: M, step: int, *, wanted: bool) -> M:
    """Ignore steps before it: their rates were wrong."""
    return policy._replace(acted_step=step)


@dataclasses.dataclass(frozen=True)
class SaveCheckpoint(Action):
  """Save a checkpoint now, whatever `checkpoint.every_steps` says."""

  words = "saves a checkpoint"
  judged = False
  can_be_tried = False

  def tell(self, host: Host, step: int, reason: str) -> None:
    """Only the loop can."""
    host.wants_checkpoint = True


@dataclasses.dataclass(frozen=True)
class Stop(Action):
  """End the run: what would help was tried, and did not, or nothing would.

  Attributes:
    advice: what the user should do.
  """

  words = "stops the run"
  judged = False

  advice: str = (
    "Lower optimizer.learning_rate, or look at the data (python -m ats_jax data stats). No "
    "checkpoint holds such weights."
  )

  @property
  def can_be_asked_for(self) -> bool:
    """A hook raises an error of its own."""
    return False

  def tell(self, host: Host, step: int, reason: str) -> None:
    """With an error."""
    raise FloatingPointError(
      f"the orchestrator gives up at step {step}: {reason}. {self.advice} What it saw and tried is "
      "in decisions.jsonl (python -m ats_jax decisions WORKDIR)."
    )
