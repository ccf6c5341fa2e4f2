"""Says what a supervisor sees and does: in the ledger, in the metrics, in the log.

The ledger and the metrics have every look. The log has what changes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from ats_jax.orchestrator.actions.base import Action
from ats_jax.orchestrator.policy.decide import Interval
from ats_jax.orchestrator.policy.state import RISEN, Decision, Judgement, PolicyState, Request
from ats_jax.orchestrator.record.influence import bounded_steps, scale_changes
from ats_jax.orchestrator.record.ledger import Ledger
from ats_jax.orchestrator.signals.health import LEVELS, Health
from ats_jax.orchestrator.signals.interval import Reading, RowsRead, Steps
from ats_jax.orchestrator.trials.arms import Compared, Proposal
from ats_jax.store.paths import Path

Write = Callable[[int, Mapping[str, float]], None]


class Teller(Ledger):
  """Tells of one run."""

  def __init__(self, path: Path | None, write: Write | None):
    """Take where the ledger is to be, if anywhere, and what takes metrics."""
    super().__init__(path)
    self._write_metrics = write
    self._said = dict[str, int]()  # name of a cause -> its level, while it lasts

  def look(
    self, step: int, seen: Interval, judgement: Judgement, health: Health, host: Mapping[str, float]
  ) -> None:
    """What was seen at a look, and how the run is."""
    request = None if seen.request is None else seen.request.to_json()
    self.write(
      "check", step, reading=seen.reading._asdict(), stale=judgement.stale,
      health=health._asdict(), host=host, request=request, evaluated=seen.evaluated,
    )  # fmt: skip
    if not judgement.stale:
      self.health(health)

  def steps(self, step: int, steps: Steps, read: RowsRead | None, batch_size: int) -> None:
    """What was left out or shrunk, and what tells its rows; the loss's scale."""
    if (left := bounded_steps(steps)) is not None:
      at, row = read or (None, None)
      self.write("bounded", step, **left, row=row, step_of_row=at, batch_size=batch_size)
    if (scale := scale_changes(steps)) is not None:
      self.write("loss_scale", step, **scale)

  def health(self, health: Health) -> None:
    """Log a cause when it begins, when it gets better or worse, and when it is over."""
    now = dict(zip(health.names, health.levels, strict=True))
    for name, level, cause in zip(health.names, health.levels, health.causes, strict=True):
      if self._said.get(name) != level:
        logging.warning("health: %s: %s", LEVELS[level], cause)
    for name in sorted(self._said.keys() - now.keys()):
      logging.info("health: %s: no more", name)
    self._said = now

  def metrics(self, step: int, reading: Reading, policy: PolicyState, health: Health) -> None:
    """What the metrics have of a look."""
    if self._write_metrics is None:
      return
    names = {name: f"orchestrator/{name and f'{name}/'}probe_loss" for name in reading.held}
    seen = {names[name]: loss for name, loss in reading.held.items()}
    if reading.sources:
      risen = sum(name.startswith(RISEN) for name in policy.streaks)
      seen["orchestrator/risen_sources"] = risen
    self._write_metrics(step, {
      "orchestrator/health": LEVELS.index(health.level),
      "orchestrator/lr_scale": policy.lr_scale,
      "orchestrator/decisions": policy.decisions,
      "orchestrator/made_again": policy.made_again,
      **reading.looked,
      **seen,
    })  # fmt: skip

  def decision(
    self, step: int, decision: Decision, came_to: Mapping[str, Any], *, applied: bool
  ) -> None:
    """What is done, or would be."""
    self.write(
      "decision", step, decision.action, id=decision.id, cause=decision.cause,
      reason=decision.reason, applied=applied, **came_to,
    )  # fmt: skip
    logging.warning(
      "orchestrator: step %d: %s%s%s: %s (%s)", step, decision.action,
      "".join(f" {k}={v}" for k, v in came_to.items()), "" if applied else " (not applied)",
      decision.reason, decision.cause,
    )  # fmt: skip

  def weighed(self, step: int, action: Action, before: float, after: float) -> None:
    """What an action has done to the held-out loss, before any further step."""
    self.write("weighed", step, action, before=before, after=after)
    logging.info(
      "orchestrator: step %d: %s: held-out loss %.6g before, %.6g after",
      step,
      action,
      before,
      after,
    )

  def waits(self, step: int, request: Request, reason: str) -> None:
    """What a hook asked for is not done yet."""
    self.write("waits", step, request.action, reason=reason)
    logging.info("orchestrator: step %d: %s waits: %s", step, request.action, reason)

  def refused(self, step: int, action: Action, reason: str) -> None:
    """What a hook asked for is not possible."""
    self.write("refused", step, action, reason=reason)
    logging.warning("orchestrator: what a hook asked for is not possible: %s", reason)

  def opened(self, step: int, proposal: Proposal) -> None:
    """A comparison begins."""
    logging.warning(
      "orchestrator: step %d: %s; compares %s with going on", step, proposal.reason,
      ", ".join(" and ".join(map(str, arm.actions)) for arm in proposal.arms),
    )  # fmt: skip

  def given_up(self, step: int, first: int, reason: str) -> None:
    """A comparison under way is dropped."""
    self.write("given_up", step, first=first, reason=reason)
    logging.info("orchestrator: step %d: drops the comparison since %d: %s", step, first, reason)

  def comparison(self, step: int, first: int, compared: Compared, losses: Sequence[float]) -> None:
    """What came of a comparison, and the training losses of the steps that the winner made."""
    scores = [x if isinstance(x, str) else x._asdict() for x in compared.scores]
    self.write(
      "comparison", step, first=first, proposal=compared.proposal.to_json(),
      waiting=compared.waiting._asdict(), scores=scores, made=compared.made, losses=losses,
    )  # fmt: skip
    place = compared.winner
    won = "going on" if place is None else str(compared.proposal.arms[place].actions)
    logging.warning("orchestrator: step %d: of what was compared, %s was best", step, won)
