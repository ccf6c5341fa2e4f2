"""Would it help? The next steps, made with and without an action, from one state and on one data.

Batches and randomness are the same in both arms, so their noise cancels. The learning rate falls
to 0 at the end of both: a lower rate always looks better at once, and a higher one worse, until it
is lowered (Tissue et al. 2024, arXiv:2408.11029). Nothing of it stays: the state comes back as it
was, and the loop reads those batches again.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.orchestrator.actions.base import Action, apply
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.step.state import TrainState

PAIRS = 4
SIGMAS, LEAST_GAIN = 3.2, 0.003  # Student's t with 3 degrees, 97.5 % to one side; nats


class Ahead(NamedTuple):
  """What the loop lends.

  Attributes:
    train_step: `(state, batch) -> (state, metrics)`, compiled; donates the state.
    batches: opens the training batches that come next, on the mesh.
  """

  train_step: Callable[[TrainState, Batch], tuple[TrainState, Any]]
  batches: Callable[[], AbstractContextManager[Iterator[Batch]]]


class Effect(NamedTuple):
  """What an action changes in the probe's loss, in nats.

  Attributes:
    mean: over pairs; negative is better.
    error: its standard error.
  """

  mean: float
  error: float

  @property
  def wins(self) -> bool:
    """Whether it helps beyond noise, and by enough to matter."""
    return self.mean < -max(SIGMAS * self.error, LEAST_GAIN)


def compare(
  cfg: Config,
  state: TrainState,
  action: Action,
  ahead: Ahead,
  loss: Callable[[Decoder], float],
) -> tuple[TrainState, Effect]:
  """Train `orchestrator.branch_steps` updates with and without an action, `PAIRS` times.

  Args:
    cfg: the run.
    state: donated; a copy of it is in host memory meanwhile.
    action: one that `apply` can do.
    ahead: what to train with; each pair has batches of its own.
    loss: of weights on the probe batch, by one set of rules: those of `ahead`.

  Returns:
    The state as it was, and the effect.
  """
  again, gains = Snapshot.swap_out(0, state).resume, []
  with ahead.batches() as batches:
    for _ in range(PAIRS):
      block = list(islice(batches, cfg.orchestrator.branch_steps))
      without = loss(_trained(again(), block, ahead).model)
      gains.append(loss(_trained(apply(action, again(), cfg), block, ahead).model) - without)
  return again(), Effect(float(np.mean(gains)), float(np.std(gains, ddof=1)) / math.sqrt(PAIRS))


def _trained(state: TrainState, block: Sequence[Batch], ahead: Ahead) -> TrainState:
  """The state after a block of batches, in whose second half the rate falls to 0."""
  assert state.control is not None
  scale = np.asarray(state.control.lr_scale)
  for number, batch in enumerate(block):
    left = min(1.0, 2.0 * (len(block) - number) / (len(block) + 1))
    assert state.control is not None
    control = state.control._replace(lr_scale=jnp.full_like(state.control.lr_scale, left * scale))
    state, _ = ahead.train_step(dataclasses.replace(state, control=control), batch)
  return state
