"""Says what a supervisor sees and does: in the ledger, in the metrics, in the log.

The ledger and the metrics have every look. The log has what changes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from ats_jax.orchestrator.actions.base import Action
from ats_jax.orchestrator.policy.requests import Ready
from ats_jax.orchestrator.policy.state import Decision, Judgement, Outcome, PolicyState
from ats_jax.orchestrator.record.ledger import Ledger
from ats_jax.orchestrator.signals.health import LEVELS, Health
from ats_jax.orchestrator.signals.interval import Reading, RowsRead
from ats_jax.orchestrator.trials.paired import Effect
from ats_jax.store.paths import Path

Write = Callable[[int, Mapping[str, float]], None]


class Teller:
  """Tells of one run, in its first process."""

  def __init__(self, ledger: Path | None, write: Write | None):
    """Take where the ledger is, if there is one, and what takes metrics."""
    self._ledger = None
    if ledger is not None and jax.process_index() == 0:
      self._ledger = Ledger(ledger)
    self._write = write
    self._said = dict[str, int]()  # name of a cause -> its level, while it lasts

  def note(self, kind: str, step: int, action: Action | None = None, **fields: Any) -> None:
    """A line of the ledger."""
    if self._ledger is not None:
      self._ledger.write(kind, step, action, **fields)

  def flush(self) -> None:
    """Make what the ledger holds durable."""
    if self._ledger is not None:
      self._ledger.flush()

  def close(self) -> None:
    """Make the ledger durable."""
    if self._ledger is not None:
      self._ledger.close()

  def bounded(
    self, step: int, left: Mapping[str, Any], read: RowsRead | None, batch_size: int
  ) -> None:
    """What was left out or shrunk, and what tells its rows."""
    at, row = read or (None, None)
    self.note("bounded", step, **left, row=row, step_of_row=at, batch_size=batch_size)

  def health(self, health: Health) -> None:
    """Log a cause when it begins, when it gets better or worse, and when it is over."""
    now = dict(zip(health.names, health.levels, strict=True))
    for name, level, cause in zip(health.names, health.levels, health.causes, strict=True):
      if self._said.get(name) != level:
        logging.warning("health: %s: %s", LEVELS[level], cause)
    for name in sorted(self._said.keys() - now.keys()):
      logging.info("health: %s: no more", name)
    self._said = now

  def metrics(
    self, step: int, reading: Reading, judgement: Judgement, policy: PolicyState, health: Health
  ) -> None:
    """What the metrics have of a look."""
    if self._write is None:
      return
    seen = {} if math.isnan(reading.probe) else {"orchestrator/probe_loss": reading.probe}
    self._write(step, {
      "orchestrator/health": LEVELS.index(health.level),
      "orchestrator/lr_scale": policy.lr_scale,
      "orchestrator/decisions": policy.decisions,
      "orchestrator/confidence": judgement.finding.confidence if judgement.finding else 0.0,
      **seen,
    })  # fmt: skip

  def outcome(self, step: int, outcome: Outcome) -> None:
    """What an action changed."""
    self.note("outcome", step, **outcome._asdict())
    logging.info(
      "orchestrator: decision %d %s (held-out loss %+.4g, then %+.4g, from when all was well)",
      outcome.id, outcome.verdict, outcome.before, outcome.after,
    )  # fmt: skip

  def decision(
    self, step: int, decision: Decision, came_to: Mapping[str, Any], *, applied: bool
  ) -> None:
    """What is done, or would be."""
    self.note(
      "decision", step, decision.action, id=decision.id, cause=decision.cause,
      confidence=decision.confidence, reason=decision.reason, applied=applied, **came_to,
    )  # fmt: skip
    logging.warning(
      "orchestrator: step %d: %s%s%s: %s (%s, confidence %.2f)", step, decision.action,
      "".join(f" {k}={v}" for k, v in came_to.items()), "" if applied else " (not applied)",
      decision.reason, decision.cause, decision.confidence,
    )  # fmt: skip

  def refused(self, step: int, ready: Ready) -> None:
    """What a hook asked for is not possible."""
    self.note("refused", step, ready.request.action, reason=ready.refusal)
    logging.warning("orchestrator: what a hook asked for is not possible: %s", ready.refusal)

  def trial(self, step: int, first: int, action: Action, effect: Effect, *, again: bool) -> None:
    """What came of a trial."""
    self.note("trial", step, action, again=again, first=first, **effect._asdict())
    logging.info(
      "orchestrator: step %d: tried %s on the steps from %d on: %s", step, action, first, effect
    )
