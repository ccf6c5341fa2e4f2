"""The base class of actions. An action answers every question about itself.

Code that checks, carries out, compares, records or describes actions calls their methods; there is
no list of kinds anywhere. A subclass registers under its name, so that a ledger can be read back.
docs/guides/orchestrator.md shows how to add one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax.numpy as jnp

from ats_jax.config.names import flatten
from ats_jax.config.schema import Config
from ats_jax.step.state import TrainState

Settings = tuple[tuple[str, Any], ...]
KINDS: dict[str, type["Action"]] = {}  # all there are, by name


class Memory(Protocol):
  """What an action may read and change of what the policy remembers, `policy.state.PolicyState`.

  Attributes:
    control: the scalars of the compiled step that were set, by name.
  """

  @property
  def control(self) -> Mapping[str, float]: ...  # noqa: D102

  def _replace(self, **changes: Any) -> Self: ...


class Now(NamedTuple):
  """The situation in which a requested action is about to be carried out.

  Attributes:
    cfg: the run.
    step: updates done.
    policy: says what was set before.
    state: says which experts there are; reading it waits for the step that makes it.
  """

  cfg: Config
  step: int
  policy: Memory
  state: TrainState


class Host(Protocol):
  """Services of the supervisor for actions.

  Attributes:
    wants_checkpoint: set it to have a checkpoint saved now.
  """

  wants_checkpoint: bool

  def restart_with(self, settings: Settings, before: Settings) -> None:
    """Have the run go on with other settings, from a checkpoint that it saves now."""
    ...

  def earlier(self, back: int) -> tuple[int, TrainState] | None:
    """A state that was found good, see `Rollback`, and the step that made it; None without one."""
    ...


@dataclasses.dataclass(frozen=True)
class Action:
  """Something that can be done to a run; its fields are all that a ledger keeps of it.

  Attributes:
    words: what it does, with its fields in braces.
    edits: weights are edited, so that a rollback takes it back too.
    at_pause: done only where the loop waits anyway, as before a checkpoint; the held-out loss right
      before and right after it is told.
    can_be_asked_for: a hook may ask for it.
    can_be_tried: it can be compared on the same next steps, with and without it.
    needs_saved: it replaces the state by an earlier one.
    replays: the batches since that state are trained on again, and not passed over.
    widens: its arm of a comparison multiplies without 8 bits.
    needs: a setting without which it does nothing.
  """

  words: ClassVar[str]
  edits: ClassVar[bool] = False
  at_pause: ClassVar[bool] = False
  can_be_asked_for: ClassVar[bool] = True
  can_be_tried: ClassVar[bool] = True
  needs_saved: ClassVar[bool] = False
  replays: ClassVar[bool] = False
  widens: ClassVar[bool] = False
  needs: ClassVar[str] = ""

  def __init_subclass__(cls, *, abstract: bool = False) -> None:
    """Register the class under its name, unless it is only a base of others."""
    if not abstract:
      KINDS[cls.__name__] = cls

  @property
  def begins(self) -> str:
    """The state with which its arm of a comparison begins.

    "here", or an earlier one: "good" or "first" (`trials.compare.Means`).
    """
    return "here"

  def check(self, cfg: Config, step: int = 0) -> None:
    """Check that a run of `cfg` can ever do this after `step`; `fill` checks whether it can now.

    Raises:
      ValueError: if not.
    """
    del step
    if self.needs and not (value := flatten(cfg)[self.needs]):
      raise ValueError(f"{self} does nothing in a run with {self.needs}={value}.")

  def fill(self, now: Now) -> Self:
    """Return the action with its open fields filled in.

    Raises:
      ValueError: if it is not possible as things are.
    """
    del now
    return self

  def find(
    self, host: Host, step: int, state: TrainState
  ) -> tuple[TrainState | None, dict[str, Any]]:
    """Return the earlier state that it needs, or None, and fields for the ledger."""
    del host, step, state
    return None, {}

  def tell(self, host: Host, step: int, reason: str) -> None:
    """Ask for what only the loop can do; a `FloatingPointError` ends the run."""

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Return the state in which training goes on; the same object if the action leaves it alone.

    Args:
      state: as the last step left it, of a run with `orchestrator.mode=act`; edits donate it.
      cfg: the run, for which the action was checked.
      saved: what `find` returned.

    Raises:
      SurgeryError: for an edit that is not possible; the state is as it was.
    """
    del cfg, saved
    return state

  def remember[M: Memory](self, policy: M, step: int, *, wanted: bool) -> M:
    """What the policy knows once it is done at `step`.

    Args:
      policy: before.
      step: when.
      wanted: a hook asked for it, or it won a trial; no emergency.
    """
    del wanted
    # Steps before it say nothing about an earlier state.
    return policy._replace(acted_step=step) if self.needs_saved else policy

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Describe it, after "decision 3: "; `row` is its line of the ledger."""
    del row
    return self.words.format(**dataclasses.asdict(self))

  def to_json(self) -> dict[str, Any]:
    """As JSON values: its fields, and its kind as "action"."""
    return {"action": type(self).__name__, **dataclasses.asdict(self)}


def carry_out(
  action: Action, state: TrainState, cfg: Config, saved: TrainState | None = None
) -> TrainState:
  """Apply an action. After an edit of weights, the step skips its comparison of checksums once."""
  changed = action.apply(state, cfg, saved)
  if not action.edits or action.needs_saved or changed.reflex is None:
    return changed
  knows = jnp.zeros_like(changed.reflex.knows)
  return dataclasses.replace(changed, reflex=changed.reflex._replace(knows=knows))


def frozen(value: Any, *, words: bool = True) -> Any:
  """A JSON value with tuples for lists, and numbers that JSON does not have (`ledger.encode`).

  Raises:
    ValueError: for a word, if there may be none.
  """
  if isinstance(value, Mapping):
    return {key: frozen(item, words=words) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return tuple(frozen(item, words=words) for item in value)
  is_number = isinstance(value, str) and (not words or value in ("nan", "inf", "-inf"))
  return float(value) if is_number else value


def from_json(fields: Mapping[str, Any]) -> Action:
  """What `to_json` made, also after a JSON file held it."""
  return KINDS[fields["action"]](**{k: frozen(v) for k, v in fields.items() if k != "action"})
