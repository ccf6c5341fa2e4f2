"""Would it help? The same updates from one state, made with and without an action.

The arms differ in nothing else: batches and randomness are the same, so their noise cancels. The
updates come from one of two places. *Ahead*, on the batches that come next: both arms are made for
the trial, in several pairs, and nothing of them stays. *Again*, on batches of the past: training
itself was the arm without the action, and it goes on with the better of the two.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.orchestrator.actions.base import Action, carry_out
from ats_jax.orchestrator.signals.interval import Sums, probe_loss
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.step.state import StepMetrics, TrainState

PAIRS = 4  # of arms, each pair on batches of its own

Update = Callable[[TrainState], tuple[TrainState, StepMetrics]]  # donates the state
Probe = Callable[[Decoder], Sums]  # scores the probe, by one set of rules


class NextUpdates(NamedTuple):
  """What the training loop offers to make its next updates in a trial.

  Attributes:
    train_step: `(state, batch) -> (state, metrics)`, compiled; donates the state.
    batches: opens the next training batches, on the mesh; the loop reads them again later.
  """

  train_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
  batches: Callable[[], AbstractContextManager[Iterator[Batch]]]


class Effect(NamedTuple):
  """What an action changed over the same updates. Losses are nats per token.

  Attributes:
    before: loss on the probe batch where both arms begin.
    without: the same where the arm without the action ends; ahead, the mean over pairs.
    changed: the same of the arm with it; NaN or infinite if it diverged.
    gain: how much lower the losses are with it, the mean over pairs: of arms ahead, in the loss on
      the probe batch; of steps made again, in their training loss.
    error: standard error of that mean.
  """

  before: float
  without: float
  changed: float
  gain: float
  error: float


def look_ahead(
  cfg: Config, state: TrainState, action: Action, ahead: NextUpdates, probe: Probe
) -> tuple[TrainState, Effect]:
  """Make `orchestrator.branch_steps` updates with and without an action, `PAIRS` times.

  The learning rate falls to 0 at the end of both arms: a lower rate always looks better at once,
  and a higher one worse, until it is lowered (Tissue et al. 2024, arXiv:2408.11029).

  Args:
    cfg: the run.
    state: donated; a copy of it is in host memory meanwhile.
    action: one that was checked and can be tried.
    ahead: makes the updates of the arms; each pair has batches of its own.
    probe: by the rules of `ahead`.

  Returns:
    The state as it was, and the effect.
  """
  before = probe(state.model)
  start, ends = Snapshot.swap_out(0, state), []
  end = lambda act, updates: probe(_arm(cfg, start, updates, act, anneal=True)[0].model)
  with ahead.batches() as batches:
    for _ in range(PAIRS):
      block = list(islice(batches, cfg.orchestrator.branch_steps))
      updates = [lambda state, batch=batch: ahead.train_step(state, batch) for batch in block]
      ends.append([_loss(end(act, updates)) for act in (None, action)])
  without, changed = np.array(ends).T
  return start.resume(), _effect(_loss(before), without, changed, without - changed, ddof=1)


def look_back(
  cfg: Config,
  step: int,
  state: TrainState,
  start: Snapshot,
  action: Action,
  past: NextUpdates,
  probe: Probe,
) -> tuple[Snapshot, TrainState, Effect]:
  """Make all updates since `start` again with an action, on the batches that they were made on.

  Args:
    cfg: the run.
    step: updates done.
    state: the state after the updates; its memory is freed.
    start: the state at which the arms part.
    action: the action with which the other arm begins.
    past: lends the batches from there on, and what trains with them.
    probe: by rules that are those of the start and of now.

  Returns:
    A snapshot of `state`, the state where the other arm ends, and the effect.
  """
  kept_sums, control = probe(state.model), state.control  # what was set since stays set
  left, other = Snapshot.swap_out(step, state), start.resume()
  before = probe(other.model)
  other = carry_out(action, dataclasses.replace(other, control=control), cfg)
  with past.batches() as batches:
    for batch in islice(batches, step - start.step):
      other, _ = past.train_step(other, batch)
  losses = map(_loss, (before, kept_sums, probe(other.model)))
  first, without, changed = losses
  return left, other, Effect(first, without, changed, without - changed, math.nan)


class ReplayedUpdates:
  """Updates that can be made again with an action, from the state at which a trial began.

  Attributes:
    first: step at which the arms part.
    action: the action with which the other arm begins.
    rules: the rules by which the probe was scored at the start.
  """

  def __init__(self, step: int, state: TrainState, action: Action, probe: Sums | None, rules: Pass):
    """Begin with `state`, which made `step` updates; `probe` is what scoring it gave."""
    self.first, self.action, self.rules, self._probe = step, action, rules, probe
    self._start = Snapshot.take(step, state)
    self._updates: list[Update] = []
    self._metrics: list[StepMetrics] = []

  def add(self, update: Update, metrics: StepMetrics) -> None:
    """Remember an update of the first arm, and what came of it."""
    self._updates.append(update)
    self._metrics.append(metrics)

  def make(
    self, cfg: Config, state: TrainState, probe: Probe
  ) -> tuple[Snapshot, TrainState, Effect]:
    """Make the other arm. Waits for the devices, on which there is one state at a time.

    Args:
      cfg: the run.
      state: the state at the end of the first arm; its memory is freed.
      probe: by the same rules.

    Returns:
      A snapshot of `state`, the state where the other arm ends, and the effect.
    """
    sums = [self._probe, probe(state.model)]
    left = Snapshot.swap_out(self.first + len(self._updates), state)
    other, metrics = _arm(cfg, self._start, self._updates, self.action)
    before, kept_loss, changed = map(_loss, (*sums, probe(other.model)))
    losses = lambda arm: np.array([one.on_host()["train/loss"] for one in arm])
    gains = losses(self._metrics) - losses(metrics)
    return left, other, _effect(before, [kept_loss], [changed], gains)


def _arm(
  cfg: Config,
  start: Snapshot,
  updates: Sequence[Update],
  action: Action | None,
  *,
  anneal: bool = False,
) -> tuple[TrainState, list[StepMetrics]]:
  """An arm from a snapshot: its last state, and the metrics of each update.

  Args:
    cfg: the run.
    start: the state at which an arm begins.
    updates: the updates that are made from it.
    action: done first, if any.
    anneal: let the learning rate fall to 0 in the second half.
  """
  state, made = start.resume(), []
  if action is not None:
    state = carry_out(action, state, cfg)
  assert state.control is not None
  scale = np.asarray(state.control.lr_scale) if anneal else None
  for number, update in enumerate(updates):
    if scale is not None:
      left = min(1.0, 2.0 * (len(updates) - number) / (len(updates) + 1))
      state = _at_rate(state, left * scale)
    state, metrics = update(state)
    made.append(metrics)
  return state, made


def _at_rate(state: TrainState, scale: float | np.ndarray) -> TrainState:
  control = state.control
  assert control is not None
  control = control._replace(lr_scale=jnp.full_like(control.lr_scale, scale))
  return dataclasses.replace(state, control=control)


def _loss(sums: Sums | None) -> float:
  assert sums is not None, "the probe was not read where the arms part"
  return probe_loss(sums)


def _effect(
  before: float,
  without: Sequence[float],
  changed: Sequence[float],
  gains: np.ndarray,
  ddof: int = 0,
) -> Effect:
  mean = lambda values: float(np.mean(values))
  error = float(np.std(gains, ddof=ddof)) / math.sqrt(len(gains))
  return Effect(before, mean(without), mean(changed), mean(gains), error)
