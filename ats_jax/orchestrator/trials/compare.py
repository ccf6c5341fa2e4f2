"""Makes the arms of a comparison, from snapshots in host memory and on the run's own batches.

The run goes on while a comparison is open, which is its first arm and costs nothing. Then the other
arms are made, one after the other: there is one state on the devices at a time.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.orchestrator.actions.base import carry_out
from ats_jax.orchestrator.actions.expert_view import SurgeryError
from ats_jax.orchestrator.actions.loop import as_of
from ats_jax.orchestrator.constants import LEAST_MARGIN, SEEN_BATCHES
from ats_jax.orchestrator.ports import Loop, NextUpdates
from ats_jax.orchestrator.signals.probe import is_exact
from ats_jax.orchestrator.signals.watch import Watch
from ats_jax.orchestrator.trials.arms import Arm, Compared, Proposal, Score, is_better, is_mended
from ats_jax.orchestrator.trials.snapshots import Snapshot, Snapshots
from ats_jax.step.program import Program
from ats_jax.step.state import StepMetrics, TrainState

Saved = Mapping[str, Any]  # a position of the loop, as its checkpoints keep it


@dataclasses.dataclass(frozen=True)
class Means:
  """What arms are made and scored with.

  Attributes:
    program: of the run.
    ahead: lends updates and batches from a position on.
    held: loss on held-out text: domain -> nats per token, "" is all of it.
    seen: sum of the cross-entropy on a training batch, and number of its tokens.
    good: the newest state that was found good; None = there is none.
    first: that of step 0, while it is kept.
    unchanged: whether nothing but steps has changed the state since `good`.
    wide: those without 8 bits, of arms that switch them off: each is scored as it would go on.
  """

  program: Program
  ahead: Callable[[Saved], NextUpdates]
  held: Callable[[Decoder], Mapping[str, float]]
  seen: Callable[[Decoder, Batch], tuple[float, float]]
  good: Snapshot | None
  first: Snapshot | None
  unchanged: bool
  wide: "Means | None" = None

  @classmethod
  def of(
    cls, watch: Watch, loop: Loop, ring: Snapshots, since: int, step: int, changed: int
  ) -> "Means | None":
    """Those of a run; None if the model has changed its rules since the arms parted.

    Args:
      watch: scores, with the program of the run.
      loop: makes updates.
      ring: states to begin from.
      since: the step at which the arms part.
      step: at which they end.
      changed: the last step after which something else than a step changed the state.
    """
    program = watch.program
    rules, trains = program.rules(step), program.training_rules(step)
    same = lambda at: program.training_rules(at + 1) == trains and program.rules(at) == rules
    if not same(since):
      return None
    good, first = (
      x if x is not None and same(x.step) else None for x in (ring.back(0), ring.first)
    )
    unchanged = good is not None and changed <= good.step
    means = cls(program, loop.ahead, *watch.scoring(rules), good, first, unchanged)
    if not rules.fp8 or not program.cfg.precision.fp8:
      return means
    held, seen = watch.scoring(dataclasses.replace(rules, fp8=False))
    return dataclasses.replace(means, wide=dataclasses.replace(means, held=held, seen=seen))

  @property
  def exact(self) -> bool:
    """Whether the same steps must lead to the same bits."""
    return is_exact(self.program)


class Ended(NamedTuple):
  """What a comparison came to.

  Attributes:
    compared: what is known of its arms.
    state: where the winner ended; the run goes on from it.
    losses: training losses of the steps that the winner made, up to the end; () = waiting won.
    origin: step of the earlier state that the winner began from; None = of none.
  """

  compared: Compared
  state: TrainState
  losses: tuple[float, ...]
  origin: int | None


class Comparison:
  """A comparison under way.

  Attributes:
    first: step at which the arms part.
    proposal: what is compared.
    metrics: of the run's own steps since.
  """

  def __init__(
    self, step: int, state: TrainState, proposal: Proposal, saved: Saved, held: Mapping[str, float]
  ):
    """Begin after `step` updates with a copy of `state`, whose held-out loss is `held`."""
    self.first, self.proposal, self.metrics = step, proposal, list[StepMetrics]()
    self._here, self._held, self._made = Snapshot.take(step, state, saved), held, 0

  def end(self, step: int, state: TrainState, means: Means, most: int) -> Ended:
    """Make the other arms up to `step`, and return the best state in place of `state`. Waits.

    No arm is made that takes more than is left of `most` updates.
    """
    seen = self._seen_batches(means)
    waiting = best = _score(means, state.model, self.metrics, seen)
    if is_mended(self.proposal, waiting):
      return Ended(Compared(self.proposal, waiting, (), 0), state, (), None)
    kept, won, scores = Snapshot.swap_out(step, state), None, list[Score | str]()
    losses: tuple[float, ...] = ()
    for arm in self.proposal.arms:
      used = means.wide if _widens(arm) and means.wide is not None else means
      made = self._make(arm, step, used, most - self._made)
      if isinstance(made, str):
        scores.append(made)
        continue
      since_parted = len(made[1]) - (step - self.first)
      reached = _score(used, made[0].model, made[1][since_parted:], seen)
      scores.append(reached)
      if is_better(self.proposal, arm, reached, best):
        best, won, kept = reached, arm, Snapshot.swap_out(step, made[0])
        losses = _losses(made[1])
      del made  # there is memory for one state
      if is_mended(self.proposal, best):
        break
      if means.exact and arm.mends:
        break  # the same steps led elsewhere: neither batches nor the rate are to blame
    origin = None if won is None else self._origin(won, means)
    came_from = None if origin is None or origin is self._here else origin.step
    compared = Compared(self.proposal, waiting, tuple(scores), self._made)
    return Ended(compared, kept.resume(), losses, came_from)

  def _origin(self, arm: Arm, means: Means) -> Snapshot | None:
    """Where an arm begins; None if there is no such state any more."""
    first = arm.actions[0]
    if first.begins == "here":
      return self._here
    if first.begins == "good" and first.replays and not means.unchanged:
      return None  # the same steps would not be the same
    return getattr(means, first.begins)

  def _make(
    self, arm: Arm, end: int, means: Means, most: int
  ) -> tuple[TrainState, list[StepMetrics]] | str:
    """Where an arm ends, and the metrics of its steps; or why it was not made."""
    origin = self._origin(arm, means)
    if origin is None:
      return "there is no state to begin with"
    replays, is_check = arm.actions[0].replays, arm.mends
    begin = origin if replays else self._here
    if end - begin.step > most:
      return f"orchestrator.compare_share leaves {most:,} of its {end - begin.step:,} updates"
    state = origin.resume()
    if origin is not self._here and not is_check:
      control, rate = self._here.some(lambda s: (s.control, s.reflex.rate))
      state = as_of(state, origin.step if replays else self.first, control, rate)
      state = state if replays else means.program.catch_up(state, origin.step)
    try:
      for action in arm.actions:
        state = state if action.needs_saved else carry_out(action, state, means.program.cfg)
    except SurgeryError as error:  # it has become impossible since it was proposed
      return str(error)
    made = list[StepMetrics]()
    updates = means.ahead(json.loads(begin.saved))
    train_step = updates.wide_step if _widens(arm) else updates.train_step
    if train_step is None:
      return "8 bits are off by now"
    with updates.batches() as batches:
      for number, batch in enumerate(islice(batches, end - begin.step), begin.step):
        if number == self.first and is_check and self._is_here(state, means):
          return "the same steps led here again"
        state, metrics = train_step(state, batch)
        self._made += 1
        made.append(metrics)
    return state, made

  def _is_here(self, state: TrainState, means: Means) -> bool:
    """Whether steps that were made again led to where the arms part."""
    if means.exact:
      assert state.reflex is not None, "only a run with a reflex is compared"
      (written,) = self._here.some(lambda s: (s.reflex.written,))
      return bool(np.array_equal(np.asarray(state.reflex.written), np.asarray(written)))
    held = means.held(state.model)
    return all(abs(held[name] - loss) <= LEAST_MARGIN for name, loss in self._held.items())

  def _seen_batches(self, means: Means) -> list[Batch]:
    """A few batches that were trained on between the snapshot and here."""
    good, counts = means.good, any(arm.remembers for arm in self.proposal.arms)
    if good is None or good.step == self.first or not counts:
      return []
    count = self.first - good.step
    places = set(np.linspace(0, count - 1, min(count, SEEN_BATCHES)).astype(int).tolist())
    with means.ahead(json.loads(good.saved)).batches() as batches:
      return [batch for place, batch in enumerate(islice(batches, count)) if place in places]


def _widens(arm: Arm) -> bool:
  return any(action.widens for action in arm.actions)


def _score(means: Means, model: Decoder, metrics: list[StepMetrics], seen: list[Batch]) -> Score:
  sums = [means.seen(model, batch) for batch in seen]
  tokens = math.fsum(number for _, number in sums)
  loss = math.fsum(total for total, _ in sums) / tokens if tokens else math.nan
  return Score(means.held(model), _losses(metrics), loss)


def _losses(metrics: list[StepMetrics]) -> tuple[float, ...]:
  return tuple(one.on_host()["train/loss"] for one in metrics)
