"""Settings that a run can change in its middle: at a checkpoint, from which it goes on anew.

Another shape or another precision is another program. The step is compiled again, from the cache of
programs if the run had that setting before; weights, moments and the position in the data stay. A
checkpoint says what was changed, so that the command that began a run goes on with it, and
evaluation and generation use each checkpoint as it was made.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from ats_jax.config.build import with_settings
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config
from ats_jax.config.schema.schedule import WarmupStableDecay
from ats_jax.orchestrator.actions.base import Action, Host, Memory, Now, Settings
from ats_jax.sharding.mesh import mesh_sizes
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.schedule import decay_from, learning_rate
from ats_jax.step.state import TrainState

CHANGEABLE = frozenset(
  (
    "num_steps",
    "moe.aux_loss",
    "moe.bias_rate",
    "moe.capacity_factor",
    "moe.sequence_aux_loss",
    "mod.capacity",
    "precision.compute_dtype",
    "precision.fp8",
    "data.batch_size",
    "step.accum_steps",
    "step.remat",
    "optimizer.learning_rate",
    "optimizer.b2",
    "optimizer.weight_decay",
    "checkpoint.every_steps",
    "eval.every_steps",
  )
)


@dataclasses.dataclass(frozen=True)
class Reopening(Action, abc.ABC, abstract=True):
  """Goes on from a checkpoint with other settings.

  Attributes:
    settings: (name, value) of each, of those in `CHANGEABLE`; filled in when it is done.
    before: the same with what they were.
  """

  can_be_tried = False

  settings: Settings = dataclasses.field(default=(), kw_only=True)
  before: Settings = dataclasses.field(default=(), kw_only=True)

  @abc.abstractmethod
  def wanted(self, cfg: Config, step: int) -> Settings:
    """The settings of a run of `cfg` after `step`.

    Raises:
      ValueError: if there are none for it.
    """

  def check(self, cfg: Config, step: int = 0) -> None:
    """Check that each setting may change, and to its new value."""
    with_new_settings(cfg, self, step)

  def fill(self, now: Now) -> Self:
    """Fill in the settings and their old values."""
    flat, settings = flatten(now.cfg), self.wanted(now.cfg, now.step)
    before = tuple((name, flat[name]) for name, _ in settings)
    return dataclasses.replace(self, settings=settings, before=before)

  def apply(self, state: TrainState, cfg: Config, saved: TrainState | None = None) -> TrainState:
    """Adapt the state to the new settings: the reflex's limit on the rate, the optimizer's own."""
    new = with_settings(cfg, dict(self.settings))
    if state.control is None or state.reflex is None:
      return state
    wanted = learning_rate(new, state.step) * state.control.lr_scale
    opt_state = state.opt_state
    if (refit := build_optimizer(new, "cpu").refit) is not None:  # that of any platform
      opt_state = refit(opt_state)
    return dataclasses.replace(state, opt_state=opt_state, reflex=state.reflex.allow_rate(wanted))

  def tell(self, host: Host, step: int, reason: str) -> None:
    """Only the loop can."""
    host.restart_with(self.settings, self.before)

  def narrate(self, row: Mapping[str, Any]) -> str:
    """Each of them."""
    were = dict(self.before)
    of_each = (f"{name}={value} ({were[name]} before)" for name, value in self.settings)
    return f"goes on from here with {', '.join(of_each)}"


@dataclasses.dataclass(frozen=True)
class ChangeSettings(Reopening):
  """Save a checkpoint, and go on from it with other settings; compiles the step again.

  Attributes:
    settings: (name, value) of each, of those in `CHANGEABLE`.
    before: the same with what they were; filled in when it is done.
  """

  settings: Settings = ()
  before: Settings = ()

  def wanted(self, cfg: Config, step: int) -> Settings:
    """Those that it was made with."""
    return self.settings


@dataclasses.dataclass(frozen=True)
class GrowBatch(Reopening):
  """Batches `by` times as large for the tokens that are left, in micro-batches of the same size.

  The optimizer says which of its settings go with it (`OptimizerConfig.for_larger_batches`). The
  schedule must be flat and go by the step alone, or it would jump.

  Attributes:
    by: factor, at least 2.
  """

  by: int = 2

  def wanted(self, cfg: Config, step: int) -> Settings:
    """Batch, micro-batches, length and what the optimizer has to say."""
    if self.settings:
      return self.settings
    by = self.by
    if by < 2:
      raise ValueError(f"batches are to be {by} times as large; use a whole number from 2 on.")
    o, left = cfg.optimizer, cfg.num_steps - step
    of_optimizer = o.for_larger_batches(by)
    if of_optimizer is None:
      raise ValueError(
        f"optimizer.name={o.name} does not say how its settings go with larger batches. Leave "
        "data.batch_size as it is."
      )
    if o.schedule.name != "constant" and not _is_flat(cfg, step):
      raise ValueError(
        f"optimizer.schedule={o.schedule.name} at step {step} of {cfg.num_steps} would jump with "
        "fewer steps. Batches can grow in the flat part of 'wsd' or 'constant'."
      )
    return (
      ("data.batch_size", by * cfg.data.batch_size),
      ("step.accum_steps", by * cfg.step.accum_steps),
      ("num_steps", step + -(-left // by)),
      *((f"optimizer.{name}", value) for name, value in of_optimizer.items()),
    )


@dataclasses.dataclass(frozen=True)
class DecayNow(Reopening):
  """End a run early, as well as it can be ended: the decay of 'wsd' begins.

  Hagele et al. 2024 (arXiv:2405.18392). `python -m ats_jax forecast` says what it would cost.
  """

  def wanted(self, cfg: Config, step: int) -> Settings:
    """An earlier end."""
    if self.settings:
      return self.settings
    if not _is_flat(cfg, step):
      raise ValueError(
        f"optimizer.schedule={cfg.optimizer.schedule.name} over num_steps={cfg.num_steps} cannot "
        f"begin to decay after step {step}: only 'wsd' can, and only sooner than it would anyway."
      )
    return (("num_steps", decay_from(cfg, step)),)


@dataclasses.dataclass(frozen=True)
class EndRun(Reopening):
  """Save a checkpoint and end the run well: the same command says that it is complete.

  Who gives it a later `num_steps` goes on.
  """

  def wanted(self, cfg: Config, step: int) -> Settings:
    """The end is now."""
    return self.settings or (("num_steps", step),)

  def check(self, cfg: Config, step: int = 0) -> None:
    """Check that a run may be as short, if it is known how short."""
    if self.settings or step:
      with_settings(cfg, dict(self.wanted(cfg, step)))


@dataclasses.dataclass(frozen=True)
class FullPrecision(Action):
  """Switch 8 bits off for good: matmuls are in `precision.compute_dtype` from now on.

  An arm of a comparison needs another step only. For the run it is a change of settings.
  """

  needs = "precision.fp8"
  widens = True
  words = "switches 8 bits off"

  def tell(self, host: Host, step: int, reason: str) -> None:
    """Only the loop can."""
    host.restart_with((("precision.fp8", False),), (("precision.fp8", True),))

  def remember[M: Memory](self, policy: M, step: int, *, wanted: bool) -> M:
    """Losses with 8 bits, and steps with them, say nothing about those to come."""
    return policy._replace(acted_step=step, best={}, history={})


def with_new_settings(cfg: Config, action: Reopening, step: int) -> Config:
  """`cfg` as it is to be from `step` on.

  Raises:
    ValueError: for a setting that cannot change, or a value that cannot be.
  """
  values = dict(action.wanted(cfg, step))
  if unknown := sorted(values.keys() - CHANGEABLE):
    raise ValueError(
      f"{', '.join(unknown)} cannot change in the middle of a run. These can: "
      f"{', '.join(sorted(CHANGEABLE))}."
    )
  if "moe.capacity_factor" in values and cfg.moe.dispatch != "capacity":
    raise ValueError(
      f"moe.capacity_factor does nothing with moe.dispatch={cfg.moe.dispatch}: none is dropped."
    )
  if "mod.capacity" in values and cfg.mod.routing == "none":
    raise ValueError("mod.capacity does nothing with mod.routing=none: no layer skips tokens.")
  new = with_settings(cfg, values)
  formats = cfg.precision.compute_dtype, new.precision.compute_dtype
  if (cfg.precision.scaling is None) != (new.precision.scaling is None):
    raise ValueError(
      f"precision.compute_dtype cannot change from {formats[0]} to {formats[1]}: with float16, and "
      "only then, the state holds a scale of the loss. bfloat16 and float32 can follow each other."
    )
  if new.num_steps <= step:
    raise ValueError(f"num_steps={new.num_steps} is over at step {step}. Use a later one.")
  if _micro_batch(new) != _micro_batch(cfg):
    raise ValueError(
      f"data.batch_size={new.data.batch_size} with step.accum_steps={new.step.accum_steps} makes "
      f"micro-batches of {_micro_batch(new):g} rows, until now of {_micro_batch(cfg):g}: memory "
      "and the probe batch are for those. Change both by the same factor."
    )
  mesh_sizes(new, jax.device_count())
  return new


def _is_flat(cfg: Config, step: int) -> bool:
  """Whether the schedule is 'wsd' and its decay has not begun."""
  schedule = cfg.optimizer.schedule
  if not isinstance(schedule, WarmupStableDecay):
    return False
  return step + 1 < cfg.num_steps * (1.0 - schedule.decay_fraction)


def _micro_batch(cfg: Config) -> float:
  return cfg.data.batch_size / cfg.step.accum_steps
