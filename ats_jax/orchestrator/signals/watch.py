"""Gathers what the steps of a run report, and measures the weights at each look, for the next one.

Only `read` waits for the device: a look reads what was gathered at the one before.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ats_jax.config.schema.mixture import freezes
from ats_jax.data.batch import Batch
from ats_jax.metrics.clock import Clock, Totals
from ats_jax.metrics.host_copy import start_copy
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import trainable
from ats_jax.orchestrator.ports import Loop, rows_read
from ats_jax.orchestrator.signals.changes import Changes
from ats_jax.orchestrator.signals.copies import Copies
from ats_jax.orchestrator.signals.counts import Schedule, wrong_counts, wrong_position
from ats_jax.orchestrator.signals.experts import OpenExperts
from ats_jax.orchestrator.signals.health import Cause, moved
from ats_jax.orchestrator.signals.interval import (
  Finding,
  Reading,
  RowsRead,
  Steps,
  Sums,
  probe_sums,
  sum_up,
)
from ats_jax.orchestrator.signals.probe import Probe
from ats_jax.orchestrator.signals.sources import Rise, where
from ats_jax.step import tensors
from ats_jax.step.program import Program
from ats_jax.step.schedule import phase_starts
from ats_jax.step.state import StepMetrics, TrainState

REMEMBERED_LAPS = 6


Held = Callable[[Decoder], dict[str, float]]  # domain -> nats per token, "" is all text
Seen = Callable[[Decoder, Batch], tuple[float, float]]  # sum of the cross-entropy, and tokens


class Pending(NamedTuple):
  """Steps that no look has read yet.

  Attributes:
    step: the last of them.
    rows: `StepMetrics.values` of each, on their way to the host.
    loads: moe/load of each step, if experts are watched.
    rules: by which the probe is scored after these steps.
    host: times of these steps by this process's clock.
    read: position of the loop in the data after the last step; None = unknown.
    probe: sums of the eval step for the weights after the last step; None = not scored.
    again: sums of a second score of the same weights, at a pause; None = there is none.
    logits: see `Reading.logits`; None = not measured.
    copies: what comparing copies of these weights comes to (`Copies`); None = not compared.
    sums: of the tensors of these weights (`Changes`); None = another path led to them.
  """

  step: int
  rows: list[jax.Array]
  loads: list[jax.Array]
  rules: Pass
  host: dict[str, float]
  read: RowsRead | None = None
  probe: Sums | None = None
  again: Sums | None = None
  logits: jax.Array | None = None
  copies: jax.Array | None = None
  sums: jax.Array | None = None

  def of_another_path(self) -> "Pending":
    """The steps, without what was measured of the weights that they led to."""
    return self._replace(probe=None, logits=None, copies=None, sums=None)


class Watch:
  """What is seen of one run.

  Attributes:
    program: of the run, which scores the probe.
    probe: held-out text; None = there is none.
    names: of the step's metrics.
    laps: times of the last intervals.
  """

  def __init__(
    self,
    program: Program,
    probe: Probe | None,
    loop: Loop | None,
    totals: Totals | None,
    schedule: Schedule | None,
  ):
    """Take what is watched; arguments as of `Supervisor`."""
    self.program, self.probe, self.names = program, probe, ()
    self.laps = list[dict[str, float]]()
    self._loop, self._clock, self._schedule = loop, Clock(totals), schedule
    self._rows, self._loads = list[jax.Array](), list[jax.Array]()
    self._experts: OpenExperts | None = None
    self._changes, self._moved = Changes(), list[Cause]()  # the latter at the last look

  def start(
    self, step: int, state: TrainState, remembered: Sequence[str | None] | None = None
  ) -> None:
    """Begin before the update after `step`; compiles what looks need.

    Args:
      step: updates done.
      state: after them.
      remembered: what `remembered` gave when the state was saved.

    Raises:
      ValueError: if the probe holds no token.
    """
    self._tensors = tensors.names(self.program.cfg, trainable(state.model))
    self._copies, self._begin = Copies(self._tensors), rows_read(self._loop, step)
    self._copies.begin(state.model)
    self._changes.begin(state.model)
    if remembered:
      self._changes.restore(remembered)
    if self.probe is not None:
      self.probe.begin(self.program, state.model, self.program.rules(step))
      self.probe.logits(state.model, self.program.rules(step))
    if self.program.cfg.moe.spare_experts:
      self._experts = OpenExperts(self.program.cfg, state)

  def remembered(self) -> list[str | None]:
    """What a run that goes on from a checkpoint must know; JSON values."""
    return self._changes.to_json()

  def follow(self, program: Program, step: int, state: TrainState) -> None:
    """Measure with `program` from update `step` on."""
    self.program = program
    if self.probe is not None:
      jax.block_until_ready(self.probe.score(program, state.model, program.rules(step)))
      self.probe.logits(state.model, program.rules(step))

  def edited(self, state: TrainState) -> None:
    """Something else than steps made `state`: other experts may be open."""
    self._changes.forget()
    if self._experts is not None:
      self._experts = OpenExperts(self.program.cfg, state)

  def take(self, metrics: StepMetrics) -> None:
    """Those of the next step."""
    self.names = metrics.names
    start_copy(metrics.values)
    self._rows.append(metrics.values)
    if self._experts is not None:
      start_copy(metrics.layers["moe/load"])
      self._loads.append(metrics.layers["moe/load"])

  def gather(self, step: int, state: TrainState, *, scores: bool) -> Pending:
    """Begin to measure the state after the steps so far; `scores` the probe too."""
    rows, loads, self._rows, self._loads = self._rows, self._loads, [], []
    rules, measured = self.program.rules(step), {}
    if self.probe is not None and scores:
      measured["probe"] = self.probe.score(self.program, state.model, rules)
      measured["logits"] = self.probe.logits(state.model, rules)
    host, copies = self._clock.lap(len(rows)), self._copies.begin(state.model)
    read = rows_read(self._loop, step)
    sums = self._changes.begin(state.model)
    return Pending(step, rows, loads, rules, host, read, copies=copies, sums=sums, **measured)

  @property
  def has_steps(self) -> bool:
    """Whether there are steps that `gather` has not taken."""
    return bool(self._rows)

  def settle(self, pending: Pending | None, step: int, state: TrainState) -> Pending | None:
    """What a pause reads last, of `state`, with its probe scored twice: new steps, or `pending`."""
    last = self.gather(step, state, scores=True) if self._rows else pending
    if last is None or self.probe is None:
      return last
    probe, score = self.probe, lambda: probe.score(self.program, state.model, last.rules)
    return last._replace(probe=last.probe or score(), again=score())

  def pass_over(self, steps: int) -> None:
    """Steps of comparisons took the time since: it is no training."""
    self._clock.lap(max(steps, 1))

  def read(self, pending: Pending) -> tuple[Reading, Steps]:
    """What was gathered, and the metrics of its steps."""
    steps = Steps(self.names, pending.step, np.stack(jax.device_get(pending.rows)))
    losses, seen, metrics = {}, dict[str, Any](), dict[str, float]()
    if self.probe is not None and pending.probe is not None:
      losses = self.probe.losses(pending.probe)
    reading = sum_up(steps, losses, self._tensors)
    if self.probe is not None:
      seen["rules"] = dataclasses.astuple(pending.rules)
    if pending.logits is not None:
      seen["logits"] = tuple(np.asarray(pending.logits).tolist())
      if (largest := max(seen["logits"])) > -math.inf:
        metrics["orchestrator/attention_logit"] = largest
    if pending.copies is not None:
      metrics["orchestrator/odd_copies"] = float(np.count_nonzero(pending.copies))
    self._moved = []
    if pending.sums is not None:
      if self._trains_others(pending):
        self._changes.begin_anew()
      times = self._changes.times_usual(pending.sums)
      metrics["orchestrator/tensor_change"] = float(np.max(times))
      if reading.applied > 0.0:  # else nothing should move
        self._moved = moved(times.tolist(), self._tensors)
    if self._experts is not None:
      seen["starved"] = self._experts.starved(jax.device_get(pending.loads))
    self.laps = [*self.laps, pending.host][-REMEMBERED_LAPS:]
    return reading._replace(faults=self._faults(pending, steps), looked=metrics, **seen), steps

  def _trains_others(self, pending: Pending) -> bool:
    """Whether other tensors may train since some update of these."""
    cfg, first = self.program.cfg, pending.step - len(pending.rows)
    begun = (first <= start < pending.step for start in phase_starts(cfg)[1:])
    return freezes(cfg.data) and any(begun)

  def _faults(self, pending: Pending, steps: Steps) -> tuple[Finding, ...]:
    cfg, disagree = self.program.cfg, ()
    if self.probe is not None and pending.probe is not None and pending.again is not None:
      disagree = self.probe.disagreement(self.program, pending.probe, pending.again)
    counts = wrong_counts(cfg, self._schedule, steps)
    elsewhere = wrong_position(cfg, self._begin, pending.read)
    return (*self._copies.faults(pending.copies), *elsewhere, *disagree, *counts)

  def causes(self, rises: Sequence[Rise], read: RowsRead | None, steps: Steps) -> list[Cause]:
    """What is worth a word of the tensors and sources that were read last.

    Args:
      rises: sources whose training loss has risen.
      read: position of the loop in the data after the last step; None = unknown.
      steps: what they reported.
    """
    causes = [*self._moved]
    for rise in rises:  # also which rows and files
      at = ""
      if self._loop is not None and read is not None:
        batch_size, origin = self.program.cfg.data.batch_size, self._loop.origin
        at = f"; {where(rise.source, steps, read, batch_size, origin)}"
      causes.append(Cause(f"source {rise.source}", 1, rise.says + at))
    return causes

  def scoring(self, rules: Pass) -> tuple[Held, Seen]:
    """How models are scored by rules: on the probe, and on a batch."""
    probe, program = self.probe, self.program
    assert probe is not None, "or nothing is compared"
    return (
      lambda model: probe.losses(probe.score(program, model, rules)),
      lambda model, batch: probe_sums(Probe(batch).score(program, model, rules)),
    )
