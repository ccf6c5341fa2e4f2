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


class Arm(NamedTuple):
  """A way to guard a run."""

  how: How = How()
  guard: Callable[[], guards.Guard] | None = None  # of the host
  supervised: bool = False  # whether the orchestrator's supervisor watches


OURS, OBSERVING = "ours", "ours-observe"
OWN = {  # `reflex` is the ablation: the guard inside the step, and nobody who watches
  OURS: Arm(How("act"), supervised=True),
  OBSERVING: Arm(How("observe"), supervised=True),
  "reflex": Arm(How("act")),
}
ARMS = {
  "none": Arm(How(clip=False)),
  "clip": Arm(),
  "adagc": Arm(How(clip=False, before=clips.adagc)),
  "zclip": Arm(How(before=clips.zclip)),
  "skip_step": Arm(guard=guards.SkipStep),
  "repeat_step": Arm(guard=guards.RepeatStep),
  "rewind": Arm(guard=guards.Rewind),
  "ema_rollback": Arm(guard=guards.EmaRollback),
  "zscore_ladder": Arm(guard=guards.ZscoreLadder),
  "restart": Arm(guard=guards.Restart),
} | OWN


def find(name: str) -> Arm:
  """The arm of `ARMS`, or the guard `module:Class` of somebody else."""
  return ARMS[name] if name in ARMS else Arm(guard=guards.load(name))


def build(how: How, cfg: Config, settings: tuple[tuple[str, Any], ...]) -> Program:
  """Build a program with the settings of a scenario under the current mesh, to be compiled."""
  given = dict(settings) | ({} if how.clip else {"grad_clip": 0.0})
  phases = given.pop("phases", cfg.data.phases)
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
