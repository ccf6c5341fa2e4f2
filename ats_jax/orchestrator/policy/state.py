"""What the policy remembers between two looks, and what it says; plain values."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from ats_jax.orchestrator.actions.base import Action, from_json, frozen
from ats_jax.orchestrator.constants import LADDER_LOOKS
from ats_jax.orchestrator.signals.interval import Finding
from ats_jax.orchestrator.signals.sources import History, Rise
from ats_jax.orchestrator.trials.arms import Proposal

# Causes of decisions that are to last: a recovery does not take them back.
TRIED = "comparison"
LASTING = ("request", TRIED, "plateau", "first rate")
RISEN = "source "  # before its name, of `PolicyState.streaks`: a source whose training loss rose
MACHINE = "machine"  # of `PolicyState.rests`: it was found to compute wrongly, and that stays
ANY = "any"  # of `PolicyState.rests`: while a comparison is open, there is no other


class Request(NamedTuple):
  """An action that is wanted.

  Attributes:
    action: the action that is asked for.
    cause: as of a `Decision`. Where nothing is wrong, "request" if it is to be done, and
      "comparison" if it is to win a comparison first.
    reason: in words.
  """

  action: Action
  cause: str = "request"
  reason: str = "a hook asked for it"

  def to_json(self) -> dict[str, Any]:
    """Return the fields as JSON values."""
    return {**self._asdict(), "action": self.action.to_json()}

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Request":
    """What `to_json` made."""
    return cls(**{**fields, "action": from_json(fields["action"])})


class Decision(NamedTuple):
  """An action, and why.

  Attributes:
    id: counts decisions of a run.
    action: the action to carry out, or whose arm of a comparison the run goes on with.
    cause: of the `Finding`, the `Request` or the arm; "recovery" for what takes back a cut.
    reason: in words.
  """

  id: int
  action: Action
  cause: str
  reason: str


class Judgement(NamedTuple):
  """What the policy concludes from a look or a comparison.

  Attributes:
    stale: the steps are from before the last action; nothing was concluded.
    good: the state at the start of the interval has proven itself.
    finding: what is wrong; None = nothing is.
    decisions: in the order to be applied; after a comparison, what its winner has done already.
    proposal: what is to be compared from here on.
    asks: an action to be queued as a request.
    above: nats by which the held-out loss of a domain is above its reference, beyond noise.
    rises: sources whose training loss is above their own history.
  """

  stale: bool = False
  good: bool = False
  finding: Finding | None = None
  decisions: tuple[Decision, ...] = ()
  proposal: Proposal | None = None
  asks: Request | None = None
  above: float = 0.0
  rises: tuple[Rise, ...] = ()


class PolicyState(NamedTuple):
  """What the policy remembers, kept in each checkpoint.

  Attributes:
    looks: number of looks so far.
    decisions: number of decisions so far.
    history: domain -> its last held-out losses, the newest last (HISTORY of them).
    best: domain -> its reference, the lowest loss of a look that found nothing.
    best_rate: the learning rate that was applied at the reference.
    rules: the rules by which the probe was last scored (`Reading.rules`).
    streaks: name of a condition -> looks in a row in which it has held: "calm", "settling",
      "crowded", "layer/expert" of idle experts and "source NAME" of those that rose.
    control: the scalars of `Control` that were set, by name.
    lr_wanted: the scale that a recovery returns to; 1 unless a hook or a comparison set it.
    acted_step: the step of the last change to the state; earlier steps say nothing about it.
    ladder: the last looks with a rollback, the newest last.
    rests: trigger -> looks that it rests after its next lost comparison, and until which look.
    made_again: updates that comparisons have made beside the run's own.
    logits: a step behind the warm-up, and the largest attention logit of each layer then.
    sources: name of a source -> its last training losses and shares, the newest last (HISTORY).
    start: norm of the first weights, and the largest relative update since; None once judged.
    best_eval: the lowest loss of an evaluation of the validation split.
    worse_evals: evaluations since, none of which was lower.
  """

  looks: int = 0
  decisions: int = 0
  history: Mapping[str, tuple[float, ...]] = {}
  best: Mapping[str, float] = {}
  best_rate: float = 0.0
  rules: tuple[float, ...] = ()
  streaks: Mapping[str, int] = {}
  control: Mapping[str, float] = {"lr_scale": 1.0}
  lr_wanted: float = 1.0
  acted_step: int = 0
  ladder: tuple[int, ...] = ()
  rests: Mapping[str, tuple[int, int]] = {}
  made_again: int = 0
  logits: tuple[int, tuple[float, ...]] = (0, ())
  sources: Mapping[str, History] = {}
  start: tuple[float, float] | None = (0.0, 0.0)
  best_eval: float = math.inf
  worse_evals: int = 0

  @property
  def lr_scale(self) -> float:
    """What the learning rate of the schedule is multiplied with."""
    return self.control["lr_scale"]

  @property
  def rollbacks(self) -> int:
    """How many there were within the last looks."""
    return sum(look > self.looks - LADDER_LOOKS for look in self.ladder)

  def streak(self, name: str) -> int:
    """Looks in a row of a condition."""
    return self.streaks.get(name, 0)

  def rests_from(self, trigger: str) -> bool:
    """Whether it is too early for a comparison by `trigger`."""
    return self.looks < max(self.rests.get(name, (0, 0))[1] for name in (trigger, ANY))

  def to_json(self) -> dict[str, Any]:
    """Return the fields as JSON values; infinities are among them, as Python's json writes them."""
    return self._asdict()

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> Self:
    """What `to_json` made, also after a JSON file held it."""
    return cls(**{name: frozen(value) for name, value in fields.items() if name in cls._fields})
