"""What is compared, and which of it is best: plain values and one rule.

The first arm is always to wait: it is what the run itself does meanwhile. Every other arm ends at
the same step, on the same batches. All are scored on held-out text by domain, on the batches that
came, and on batches that were trained on before: a sound update improves what it was made of,
whatever the text, so a model that forgets those is damaged, and one that does better on them has
not merely been spared other data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.orchestrator.actions.base import Action, from_json, frozen


class Arm(NamedTuple):
  """Another way to spend the steps of a comparison.

  Attributes:
    actions: done first, in order. Where one needs an earlier state, the arm begins there.
    cause: of the decision, if it wins.
    least: nats of the held-out loss by which it must be better than the best arm so far.
    sigmas: standard errors by which its losses on the batches that came must be better; None =
      they do not count.
    remembers: whether its loss on batches of before must be better too.
    mends: whether it must end where nothing is wrong any more.
  """

  actions: tuple[Action, ...]
  cause: str
  least: float
  sigmas: float | None = 0.0
  remembers: bool = False
  mends: bool = False

  def to_json(self) -> dict[str, Any]:
    """Return the fields as JSON values."""
    return {**self._asdict(), "actions": [action.to_json() for action in self.actions]}

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Arm":
    """What `to_json` made."""
    return cls(**{**fields, "actions": tuple(map(from_json, fields["actions"]))})


class Proposal(NamedTuple):
  """A comparison that the policy wants.

  Attributes:
    trigger: what led to it; a trigger rests after a comparison that waiting won.
    reason: in words.
    arms: beside that of waiting, the least invasive first.
    domains: of the held-out text, whose mean counts; () = all of it.
    mended: domain -> loss at or below which nothing is wrong any more: once an arm is there,
      waiting included, no other can win. Empty = there is no such level.
    at_once: it ends where it begins: the run cannot go on, or has made the steps to be compared.
  """

  trigger: str
  reason: str
  arms: tuple[Arm, ...]
  domains: tuple[str, ...] = ()
  mended: Mapping[str, float] = {}
  at_once: bool = False

  def to_json(self) -> dict[str, Any]:
    """Return the fields as JSON values."""
    return {**self._asdict(), "arms": [arm.to_json() for arm in self.arms]}

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Proposal":
    """What `to_json` made, also after a JSON file held it."""
    return cls(**{**frozen(fields), "arms": tuple(map(Arm.from_json, fields["arms"]))})


class Score(NamedTuple):
  """Where an arm ended. Losses are nats per token; what is not finite means that it diverged.

  Attributes:
    held: domain -> loss on held-out text; "" is all of it.
    coming: training loss of each of the steps, up to their common last.
    seen: loss on batches trained on before the comparison; NaN = there are none.
  """

  held: Mapping[str, float]
  coming: tuple[float, ...]
  seen: float = math.nan

  @property
  def finite(self) -> bool:
    """Whether the arm has not diverged."""
    return bool(np.isfinite([*self.held.values(), *self.coming]).all())

  def loss(self, domains: Sequence[str] = ()) -> float:
    """Mean held-out loss of some domains, or that of all text."""
    return float(np.mean([self.held[name] for name in domains or ("",)]))


def is_mended(proposal: Proposal, score: Score) -> bool:
  """Whether an arm ends where nothing is wrong any more."""
  levels = proposal.mended.items()
  return bool(levels) and score.finite and all(score.held[name] <= most for name, most in levels)


def is_better(proposal: Proposal, arm: Arm, score: Score, best: Score) -> bool:
  """Whether an arm is better than the best one before it, on every text that counts for it."""
  if not score.finite or (arm.mends and not is_mended(proposal, score)):
    return False
  if not best.finite:
    return True
  if best.loss(proposal.domains) - score.loss(proposal.domains) <= arm.least:
    return False
  if arm.sigmas is not None and score.coming:  # no batches come if it ends at once
    gains = np.subtract(best.coming, score.coming)
    error = float(np.std(gains)) / math.sqrt(len(gains))
    if not float(np.mean(gains)) > arm.sigmas * error:
      return False
  return not arm.remembers or not score.seen >= best.seen  # NaN: it is not known


class Compared(NamedTuple):
  """A comparison that has ended.

  Attributes:
    proposal: what was compared.
    waiting: where the run itself ended.
    scores: of the arms, in their order; of one that was not made, why.
    made: updates that they took.
  """

  proposal: Proposal
  waiting: Score
  scores: tuple[Score | str, ...]
  made: int

  @property
  def winner(self) -> int | None:
    """The place of the arm that wins among those that were made; None if waiting does."""
    best, won = self.waiting, None
    for place, (arm, score) in enumerate(zip(self.proposal.arms, self.scores, strict=False)):
      if isinstance(score, Score) and is_better(self.proposal, arm, score, best):
        best, won = score, place
    return won

  @property
  def blames_machine(self) -> bool:
    """Whether it ended with steps that led elsewhere when they were made again."""
    return (
      len(self.scores) == 1 and self.proposal.arms[0].mends and isinstance(self.scores[0], Score)
    )

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Compared":
    """What a JSON file held of it."""
    score = lambda x: Score(**frozen(x, words=False))
    scores = tuple(x if isinstance(x, str) else score(x) for x in fields["scores"])
    waiting, made = score(fields["waiting"]), fields["made"]
    return cls(Proposal.from_json(fields["proposal"]), waiting, scores, made)
