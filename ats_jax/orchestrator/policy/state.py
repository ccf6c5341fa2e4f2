"""What the policy remembers between two looks; plain numbers, so that a checkpoint can hold it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from ats_jax.orchestrator import actions
from ats_jax.orchestrator.actions.base import Action

# How often each action helped, before this run has tried any: Beta(helped, did not), of eight.
# Leaving batches out is not judged: it keeps the state as it is.
PRIOR = {
  "Rollback": (7.2, 0.8),
  "SetLearningRateScale": (6.8, 1.2),
  "SetSkips": (7.2, 0.8),
  "RecycleExpert": (7.2, 0.8),
}


class Trial(NamedTuple):
  """An action whose effect is not known yet.

  Attributes:
    id: of the decision.
    action: what was done.
    step: when.
    before: how far the probe's loss was above its reference then, in nats; inf if not finite.
    requested: by a hook: says nothing about the policy.
  """

  id: int
  action: Action
  step: int
  before: float
  requested: bool = False


class Memory(NamedTuple):
  """State of the policy.

  Attributes:
    checks: looks so far.
    decisions: made so far.
    reference: the probe's loss when all was well last; None before.
    rules: by which the probe was scored for it, see `Reading`.
    spread: variance of the probe's loss from look to look.
    learning_rate: of the schedule at the last look; None before.
    healthy: looks in a row without a finding.
    broken: looks in a row in which no gradient was finite.
    odd: looks since the batches turned odd while the probe was well; 0 if they are not.
    crowded: looks in a row in which experts had too few places.
    starved: "layer/expert" -> looks in a row in which it got next to no tokens.
    lr_scale: what `Control` holds.
    bucket: likewise; None before the first look.
    acted_step: when the state was last changed; steps before tell nothing about it.
    rollbacks: looks at which there was one, the newest last.
    spent: steps of the last actions, which a budget limits.
    wait: look from which on each kind of action is allowed again.
    trial: what is being judged.
    helped: kind of action -> (times it helped, times it did not), with the prior.
    effects: sum of what was gained by judged actions, in nats, each within one.
    judged: actions judged so far.
    harms: in a row.
    latched: only watch from here on: what was done did harm.
    lr_wanted: what `lr_scale` is given back to: 1, or what a request or a branch made it.
    decay_scale: what `Control` holds.
    expert_dropout: likewise.
  """

  checks: int = 0
  decisions: int = 0
  reference: float | None = None
  rules: tuple[float, ...] = ()
  spread: float = 0.0
  learning_rate: float | None = None
  healthy: int = 0
  broken: int = 0
  odd: int = 0
  crowded: int = 0
  starved: Mapping[str, int] = {}
  lr_scale: float = 1.0
  bucket: float | None = None
  acted_step: int = 0
  rollbacks: tuple[int, ...] = ()
  spent: tuple[int, ...] = ()
  wait: Mapping[str, int] = {}
  trial: Trial | None = None
  helped: Mapping[str, tuple[float, float]] = PRIOR
  effects: float = 0.0
  judged: int = 0
  harms: int = 0
  latched: bool = False
  lr_wanted: float = 1.0
  decay_scale: float = 1.0
  expert_dropout: float = 0.0

  def to_json(self) -> dict[str, Any]:
    """As JSON values; may hold infinity, as Python's json writes it."""
    fields = self._asdict()
    if self.trial is not None:
      fields["trial"] = {**self.trial._asdict(), "action": actions.to_json(self.trial.action)}
    return fields

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> Self:
    """What `to_json` made, also after a JSON file held it."""
    trial = fields["trial"]
    if trial is not None:
      trial = Trial(**{**trial, "action": actions.from_json(trial["action"])})
    return cls(**{
      **fields,
      "trial": trial,
      "rollbacks": tuple(fields["rollbacks"]),
      "spent": tuple(fields["spent"]),
      "rules": tuple(fields.get("rules", ())),
      "helped": {kind: tuple(counts) for kind, counts in fields["helped"].items()},
    })  # fmt: skip
