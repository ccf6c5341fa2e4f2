"""What the policy remembers between two looks, and what it says; plain values."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from ats_jax.orchestrator.actions.base import Action, from_json

REQUESTED = ("request", "branch")  # causes of what a hook asked for


class Request(NamedTuple):
  """An action that is wanted, though nothing is wrong.

  Attributes:
    action: the action that is asked for.
    cause: "request" of a hook; "trial" if it is to win a paired trial first, "branch" if it did.
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


class Finding(NamedTuple):
  """What is wrong.

  Attributes:
    cause: "state", "learning rate", "data" or "system".
    confidence: probability that it is so.
    certain: shown by an invariant, not by statistics.
    reason: in words.
  """

  cause: str
  confidence: float
  certain: bool
  reason: str


class Decision(NamedTuple):
  """An action, and why.

  Attributes:
    id: counts decisions of a run.
    action: the action to carry out.
    cause: of the `Finding` or the `Request`; "recovery" for lifting an action that is no longer
      needed, "harm" for undoing one that did harm, "plateau" for a higher rate that won a trial.
    confidence: probability that there is this fault, and that the action helps.
    reason: in words.
  """

  id: int
  action: Action
  cause: str
  confidence: float
  reason: str


class Outcome(NamedTuple):
  """What an action changed.

  Attributes:
    id: id of the decision that is judged.
    verdict: "helped", "no effect" or "harmed"; "unclear", and not counted, if the data is odd now
      or the probe is scored by other rules.
    before: nats by which the probe's loss was above its reference before the action.
    after: the same, `HORIZON` looks later; NaN if it cannot be compared.
  """

  id: int
  verdict: str
  before: float
  after: float


class Judgement(NamedTuple):
  """What the policy concludes from a look or a trial.

  Attributes:
    stale: the steps are from before the last action; nothing was concluded.
    good: the state at the start of the interval has proven itself.
    finding: what is wrong; None = nothing is.
    outcome: the verdict on an earlier action; None = none was judged.
    decisions: in the order to be applied.
    tries: an action to be tried on the steps that come, if there is time for it.
    past: an action to be tried on all steps of the run so far.
    asks: an action that won a trial ahead, to be queued as a request.
  """

  stale: bool = False
  good: bool = False
  finding: Finding | None = None
  outcome: Outcome | None = None
  decisions: tuple[Decision, ...] = ()
  tries: Action | None = None
  past: Action | None = None
  asks: Request | None = None


class Trial(NamedTuple):
  """An action whose effect is not known yet.

  Attributes:
    id: id of the decision.
    action: the action that was carried out.
    step: when.
    before: nats by which the probe's loss was above its reference then; inf if not finite.
    cause: cause of the decision.
  """

  id: int
  action: Action
  step: int
  before: float
  cause: str

  @property
  def requested(self) -> bool:
    """Whether a hook requested it; its outcome then does not count for the policy."""
    return self.cause in REQUESTED


class Plateau(NamedTuple):
  """What is remembered of higher learning rates, see `growth.py`.

  Attributes:
    highest: learning rate of the schedule so far.
    calm: looks in a row at that rate, with nothing found and nothing done.
    tried: higher rates so far.
    lost: number of trials in a row that lost, up to now.
  """

  highest: float = 0.0
  calm: int = 0
  tried: int = 0
  lost: int = 0


FIRST_SPREAD = (0.08 / 5.0) ** 2  # of the probe's loss from look to look, before it is known


class PolicyState(NamedTuple):
  """What the policy remembers, kept in each checkpoint.

  Attributes:
    checks: number of looks so far.
    decisions: number of decisions so far.
    reference: the lowest loss of the probe (nats) of a look without a finding; None before one.
    reference_rate: the learning rate that was applied at the reference.
    last_probe: the probe's loss when it was last scored; None before.
    last_change: difference of the last two losses of the probe; None before.
    rules: the rules by which the probe was last scored (`Reading.rules`).
    spread: variance of the probe's loss from look to look.
    learning_rate: the schedule's learning rate at the last look; None before.
    healthy: number of looks in a row without a finding.
    odd: number of looks since the batches turned odd while the probe was well; 0 = they are not.
    crowded: number of looks in a row in which experts had too little room.
    starved: "layer/expert" -> number of looks in a row in which it got next to no tokens.
    control: the scalars of `Control` that were set, by name.
    lr_wanted: the scale that a recovery returns to; 1 unless a hook or a trial set it.
    acted_step: the step of the last change to the state; earlier steps say nothing about it.
    made: kind of action -> the last looks at which it was decided, the newest last.
    spent: the steps of the last actions, which ACTION_BUDGET limits.
    wait: kind of action -> the look from which on it is allowed again.
    trial: the action that is being judged; None = there is none.
    helped: kind of action -> (times it helped, times it did not), with its prior.
    effects: sum of the gains of judged actions, in nats, each clipped to [-1, 1].
    judged: number of actions judged so far.
    harms: number of judged actions in a row that did harm.
    latched: whether the policy stopped to act, as its actions did harm.
    plateau: the trials of higher learning rates.
    first_norm: norm of the weights in the first look; None before.
    turnover: highest norm of an update over `first_norm`, as a mean over a look.
    started: whether the rate of the first steps has been judged.
    fears: the looks at which leaving out batches was tried and lost.
  """

  checks: int = 0
  decisions: int = 0
  reference: float | None = None
  reference_rate: float = 0.0
  last_probe: float | None = None
  last_change: float | None = None
  rules: tuple[float, ...] = ()
  spread: float = FIRST_SPREAD
  learning_rate: float | None = None
  healthy: int = 0
  odd: int = 0
  crowded: int = 0
  starved: Mapping[str, int] = {}
  control: Mapping[str, float] = {"lr_scale": 1.0, "bucket": 0.0}
  lr_wanted: float = 1.0
  acted_step: int = 0
  made: Mapping[str, tuple[int, ...]] = {}
  spent: tuple[int, ...] = ()
  wait: Mapping[str, int] = {}
  trial: Trial | None = None
  helped: Mapping[str, tuple[float, float]] = {}
  effects: float = 0.0
  judged: int = 0
  harms: int = 0
  latched: bool = False
  plateau: Plateau = Plateau()
  first_norm: float | None = None
  turnover: float = 0.0
  started: bool = False
  fears: tuple[int, ...] = ()

  @property
  def lr_scale(self) -> float:
    """What the learning rate of the schedule is multiplied with."""
    return self.control["lr_scale"]

  def chances(self, kind: type[Action]) -> tuple[float, float]:
    """How often such an action helped, and did not."""
    return self.helped.get(kind.__name__, kind.prior)

  def waits(self, kind: type[Action]) -> bool:
    """Whether it is too early for such an action: one is on trial, or it cools down."""
    return self.trial is not None or self.checks < self.wait.get(kind.__name__, 0)

  def to_json(self) -> dict[str, Any]:
    """Return the fields as JSON values; infinities are among them, as Python's json writes them."""
    fields = {**self._asdict(), "plateau": self.plateau._asdict()}
    if self.trial is not None:
      fields["trial"] = {**self.trial._asdict(), "action": self.trial.action.to_json()}
    return fields

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> Self:
    """What `to_json` made, also after a JSON file held it."""
    fields = {name: value for name, value in fields.items() if name in cls._fields}
    trial = fields["trial"]
    if trial is not None:
      trial = Trial(**{**trial, "action": from_json(trial["action"])})
    tuples = lambda name: {kind: tuple(values) for kind, values in fields[name].items()}
    return cls(**{
      **fields,
      "trial": trial,
      "spent": tuple(fields["spent"]),
      "rules": tuple(fields["rules"]),
      "fears": tuple(fields["fears"]),
      "made": tuples("made"),
      "helped": tuples("helped"),
      "plateau": Plateau(**fields["plateau"]),
    })  # fmt: skip
