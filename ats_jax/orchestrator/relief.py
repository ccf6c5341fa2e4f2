"""A run that goes on from its checkpoint: out of device memory, or with other settings."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
from absl import logging

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.settings import Restart
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.sharding.mesh import mesh_sizes
from ats_jax.step.state import TrainState

Train = Callable[[Config, Path, Snapshots], TrainState]
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA's message begins


def relieved(train: Train) -> Callable[[Config, Path], TrainState]:
  """Have `train` called again, with half the micro-batch, when the device's memory runs out.

  The step's arguments were donated: what it was working on is gone. `train` goes on from the
  newest snapshot in host memory that was found good, or the newest checkpoint if that is later. An
  update is still made of the same rows, and gradients are divided once by the tokens of all of
  them, so only rounding differs.

  Only with `orchestrator.mode=act`, and in a run of one process: the others would wait for ever.

  After a `Restart`, which all processes raise at one step, it is called again as it was: the
  checkpoint says what has changed.
  """

  @functools.wraps(train)
  def again(cfg: Config, folder: Path) -> TrainState:
    snapshots = Snapshots.of(cfg.orchestrator)
    while True:
      try:
        return train(cfg, folder, snapshots)
      except Restart as change:
        logging.info("orchestrator: %s", change)
      except jax.errors.JaxRuntimeError as error:
        smaller = halve_micro_batch(cfg)
        if OUT_OF_MEMORY not in str(error) or smaller is None:
          raise
        logging.warning(
          "orchestrator: the device is out of memory. Going on from the newest good state with "
          "step.accum_steps=%d instead of %d; the updates are the same. (%s)",
          smaller.step.accum_steps, cfg.step.accum_steps, str(error).splitlines()[0],
        )  # fmt: skip
        cfg = smaller

  return again


def halve_micro_batch(cfg: Config) -> Config | None:
  """`cfg` with twice the accumulation; None if it may not be done, or there is nothing to halve."""
  accum_steps = 2 * cfg.step.accum_steps
  acts = cfg.orchestrator.mode == "act" and jax.process_count() == 1
  if not acts or cfg.data.batch_size % accum_steps:
    return None
  smaller = dataclasses.replace(cfg, step=dataclasses.replace(cfg.step, accum_steps=accum_steps))
  try:
    mesh_sizes(smaller, jax.device_count())
  except ValueError:  # fewer rows than devices that share them
    return None
  return smaller
