"""Ways to guard a run: a program of the production step, and who watches it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from ats_jax.config.schema import Config
from ats_jax.step.optimizers import Optimizer, build_optimizer
from ats_jax.step.program import Program, make_program
from lab.faults import clips, guards
from lab.faults.inject import with_faults


class How(NamedTuple):
  """What differs in a program from the production step with nothing but its usual clip."""

  mode: str = "off"  # of the orchestrator
  clip: bool = True  # whether the fixed clip of the gradient's norm stays
  before: Callable[[], optax.GradientTransformation] | None = None  # clip and Adam


class Kind(NamedTuple):
  """What makes an arm."""

  program: str = "clip"  # in `PROGRAMS`
  guard: Callable[[], guards.Guard] | None = None  # of the host
  supervised: bool = False  # whether the orchestrator's supervisor watches


PROGRAMS = {
  "none": How(clip=False),
  "clip": How(),
  "adagc": How(clip=False, before=clips.adagc),
  "zclip": How(before=clips.zclip),
  "act": How(mode="act"),
  "observe": How(mode="observe"),
}
OURS = "ours"
OWN = {  # `reflex` is the ablation: the guard inside the step, and nobody who watches
  OURS: Kind("act", supervised=True),
  "ours-observe": Kind("observe", supervised=True),
  "reflex": Kind("act"),
}
ARMS = {
  "none": Kind("none"),
  "clip": Kind(),
  "adagc": Kind("adagc"),
  "zclip": Kind("zclip"),
  "skip_step": Kind(guard=guards.SkipStep),
  "rewind": Kind(guard=guards.Rewind),
  "ema_rollback": Kind(guard=guards.EmaRollback),
  "zscore_ladder": Kind(guard=guards.ZscoreLadder),
  "restart": Kind(guard=guards.Restart),
} | OWN


def arm(name: str) -> Kind:
  """The arm of `ARMS`, or the guard `module:Class` of somebody else."""
  return ARMS[name] if name in ARMS else Kind(guard=guards.load(name))


def build(name: str, cfg: Config, settings: tuple[tuple[str, Any], ...] = ()) -> Program:
  """Build a program under the current mesh; nothing is compiled yet.

  Args:
    name: in `PROGRAMS`.
    cfg: the resolved config of the suite.
    settings: of a scenario.
  """
  how, given = PROGRAMS[name], dict(settings)
  phases = given.pop("phases", cfg.data.phases)
  given |= {} if how.clip else {"grad_clip": 0.0}
  cfg = dataclasses.replace(
    cfg,
    optimizer=dataclasses.replace(cfg.optimizer, **given),
    data=dataclasses.replace(cfg.data, phases=phases),
    orchestrator=dataclasses.replace(cfg.orchestrator, mode=how.mode),
  )
  program = make_program(cfg)
  if how.before is not None:
    platform = program.device.platform
    tx = optax.chain(how.before(), build_optimizer(cfg, platform).tx)
    program = dataclasses.replace(program, optimizer=Optimizer(tx, platform))
  return with_faults(program)
