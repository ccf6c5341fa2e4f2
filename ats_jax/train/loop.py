"""The training loop: read a batch, take a step, watch, evaluate, save; repeat."""

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from absl import logging

from ats_jax.config import Config
from ats_jax.step.state import TrainState
from ats_jax.store.paths import Path
from ats_jax.train.open import open_run, open_snapshots
from ats_jax.train.resize import smaller_micro_batch
from ats_jax.train.run import Run

if TYPE_CHECKING:  # imported by the runs that have them
  from ats_jax.orchestrator.trials.snapshots import Snapshots
  from ats_jax.train.initial_weights import InitialWeights


class End(enum.Enum):
  """Why the loop ended."""

  DONE = enum.auto()
  STOPPED = enum.auto()  # by a signal
  OTHER_SETTINGS = enum.auto()  # the run goes on from its newest checkpoint, compiled anew


def train(
  cfg: Config,
  folder: Path,
  initial: "InitialWeights | None" = None,
  resume_step: int | None = None,
) -> TrainState:
  """Train to `cfg.num_steps`, going on from the newest checkpoint in `folder` if there is one.

  Where the device's memory runs out and the orchestrator acts, the run goes on from its newest good
  state with half the micro-batch: an update is made of the same rows, so only rounding differs.

  Args:
    cfg: the run, as `from_config_dict` gives it.
    folder: workdir of the run.
    initial: weights to begin with, of another run; None = random ones.
    resume_step: the checkpoint to go on from in place of the newest one; later ones are set aside.

  Returns:
    The state at the end, or where a signal stopped the run after saving it.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
    FloatingPointError: if the loss or the weights stop being finite, and the orchestrator, if it
      acts, does not mend it.
  """
  return train_to_end(cfg, folder, initial, resume_step)[0]


def train_to_end(
  cfg: Config,
  folder: Path,
  initial: "InitialWeights | None" = None,
  resume_step: int | None = None,
  begin: Callable[[Run], None] = lambda run: None,
) -> tuple[TrainState, End]:
  """As `train`; also why it ended: DONE or STOPPED.

  `begin` gets the open run before its first update.
  """
  snapshots, end, state = open_snapshots(cfg), End.OTHER_SETTINGS, None
  while state is None:
    try:
      state, end = stretch(cfg, folder, snapshots, initial, resume_step, begin)
      resume_step = None  # the next stretch goes on
    except jax.errors.JaxRuntimeError as error:
      cfg = smaller_micro_batch(cfg, folder, error)
  return state, end


def stretch(
  cfg: Config,
  folder: Path,
  snapshots: "Snapshots | None",
  initial: "InitialWeights | None",
  resume_step: int | None = None,
  begin: Callable[[Run], None] = lambda run: None,
) -> tuple[TrainState | None, End]:
  """Open the run and train it; no state if it is to be opened again, with other settings."""
  with open_run(cfg, folder, snapshots, initial, resume_step) as run:
    if run.step == 0:
      begin(run)
    end = loop(run)
    if end is End.OTHER_SETTINGS:
      return None, end
    run.finish(complete=end is End.DONE)
    state, by = run.state, run.stop.requested or "a signal to another process"
  if end is End.STOPPED:
    logging.info("%s: saved step %d. The same command goes on from there.", by, state.step)
  return state, end


def loop(run: Run) -> End:
  """Train an open run until it ends."""
  supervisor, last_step = run.supervisor, run.cfg.num_steps
  for step in range(run.step + 1, last_step + 1):
    train_step = run.compiled_step(step)
    batch = run.next_batch()
    with run.timed("step"):
      state, metrics = train_step(run.state, batch)
      run.finish_update(step, state, metrics)

    stopped = run.stop.agreed(step)
    ends = step == last_step or bool(stopped)
    saves = ends or supervisor.wants_checkpoint or due(step, run.cfg.checkpoint.every_steps)
    keeps = due(step, run.cfg.checkpoint.local_every)
    if saves or keeps:
      run.settle(metrics)  # what is known to be bad is not saved
    if step == last_step or due(step, run.cfg.eval.every_steps):
      run.evaluate()
    if saves or keeps:
      run.save(locally=not saves)
    if stopped:
      return End.STOPPED
    if supervisor.wants_restart:
      logging.info("orchestrator: other settings from step %d on; the step is compiled again", step)
      return End.OTHER_SETTINGS
  return End.DONE


def due(step: int, every: int) -> bool:
  """Whether something that happens each `every` steps (0 = never) happens at `step`."""
  return every > 0 and step % every == 0
