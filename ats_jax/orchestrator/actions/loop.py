"""Actions for the loop: go back to an earlier state, save a checkpoint, end the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.base import Action, Host, Memory
from ats_jax.step.reflex import Control
from ats_jax.step.state import TrainState


def as_of(
  earlier: TrainState, step: int, control: Control | None, rate: jax.Array | None
) -> TrainState:
  """An earlier state as one to go on from after `step` updates.

  Its step is the host's count of batches consumed, because the count in a state may be corrupt.

  Args:
    earlier: what was found good.
    step: updates done.
    control: the scalars that were set since.
    rate: the highest learning rate so far, which is not held.
  """
  earlier = dataclasses.replace(earlier, step=jnp.full_like(earlier.step, step), control=control)
  if earlier.reflex is None or rate is None:
    return earlier
  return dataclasses.replace(earlier, reflex=earlier.reflex.allow_rate(rate))


@dataclasses.dataclass(frozen=True)
class Rollback(Action):
  """Take weights, moments and statistics from a snapshot; the data is not rewound.

  The batches since the snapshot are thus left out.

  Attributes:
    back: 0 for the newest snapshot that was found good, 1 for the one before it.
  """

  edits = True
  can_be_tried = False
  needs_saved = True

  back: int = 0

  @property
  def begins(self) -> str:
    """The newest good state: to go further back is for what is certain."""
    return "good"

  def find(
    self, host: Host, step: int, state: TrainState
  ) -> tuple[TrainState | None, dict[str, Any]]:
    """A good earlier state, with the scalars of `state` and its limit on the rate."""
    if (snapshot := host.earlier(self.back)) is None:
      return None, {}
    to, earlier = snapshot
    rate = None if state.reflex is None else state.reflex.rate
    return as_of(earlier, step, state.control, rate), {"to": to}

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Return the state that `find` gave."""
    assert saved is not None, "nothing to go back to"
    return saved

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Say how far back it goes and what that costs, once known."""
    if "to" not in row:
      return "rolls back"
    lost = row["lost"]
    took = f", {float(lost['secs']):,.0f} s" if lost["secs"] is not None else ""
    cost = f"{lost['steps']:,} steps, {lost['tokens']:,} tokens{took}"
    return f"rolls back to step {row['to']:,}, which costs {cost}"


@dataclasses.dataclass(frozen=True)
class Repeat(Action):
  """Make the steps since a snapshot again, on the same batches.

  Where that leads elsewhere though nothing else was done, the machine computed wrongly in one of
  the two, and the steps made again are the repair.

  Attributes:
    from_start: since the first state, not since the newest that was found good.
  """

  edits = True
  can_be_tried = False
  needs_saved = True
  replays = True
  can_be_asked_for = False  # only a comparison makes steps again

  from_start: bool = False

  @property
  def begins(self) -> str:
    """The newest good state, or the first."""
    return "first" if self.from_start else "good"

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Say from where on, once known."""
    since = f"{row['to']:,}" if "to" in row else "the last good state"
    return f"makes the steps from {since} on again"


@dataclasses.dataclass(frozen=True)
class CorrectStep(Action):
  """Set the count of updates in the state, which the schedule goes by, to that of the loop.

  Attributes:
    step: updates done.
  """

  words = "sets the state's count of updates to {step:,}"
  can_be_asked_for = can_be_tried = False  # only the policy has a reason to

  step: int

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
  can_be_asked_for = can_be_tried = False  # a hook raises an error of its own

  advice: str = (
    "Lower optimizer.learning_rate, or look at the data (python -m ats_jax data stats). No "
    "checkpoint holds such weights."
  )

  def tell(self, host: Host, step: int, reason: str) -> None:
    """With an error."""
    raise FloatingPointError(
      f"the orchestrator gives up at step {step}: {reason}. {self.advice} What it saw and tried is "
      "in decisions.jsonl (python -m ats_jax decisions WORKDIR)."
    )
