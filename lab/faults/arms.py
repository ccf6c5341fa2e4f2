"""Ways to guard a run: each is the production step, some with a rule around it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.supervisor import Loop, Supervisor
from ats_jax.step.optimizers import Optimizer, build_optimizer
from ats_jax.step.program import Program, make_program
from ats_jax.step.state import StepMetrics, TrainState
from lab.faults.baselines import Rule, adagc, rate_rules, skip_step, zclip
from lab.faults.inject import Fault, with_faults
from lab.faults.watchers import RULE_METRICS, Rewind

LEAST_RATE = 1e-6  # learning rate below which rate rules never go
Step = Callable[[TrainState, Any, Batch, Fault], tuple[TrainState, Any, StepMetrics]]


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to guard a run.

  Attributes:
    name: in `ARMS` or `OTHER_ARMS`.
    program: how it computes.
    step: (state, memory, batch, fault) -> (state, memory, metrics); the state is donated.
    memory: at the start.
    supervise: makes the supervisor of a run; one that does nothing where the arm has none.
    knows: whether it is told of every fault: no arm can do better.
  """

  name: str
  program: Program
  step: Step
  memory: Any
  supervise: Callable[[Batch, Loop], Supervisor | NoSupervisor]
  knows: bool = False


@dataclasses.dataclass(frozen=True)
class Kind:
  """What makes an arm.

  Attributes:
    mode: of the orchestrator.
    clip: whether the fixed clip of the gradient's norm stays.
    before: what comes before clip and Adam.
    rule: around the step.
    blind: what of the reflex's memory is kept from learning, so that it never objects.
    watched: whether the supervisor looks on.
    probe: whether it has held-out rows to look at.
    knows: whether it is told of every fault.
    raises: whether it tries higher learning rates.
    rewinds: whether it goes back when the loss stands high (`Rewind`).
    moe: what differs in `moe`.
  """

  mode: str = "off"
  clip: bool = True
  before: Callable[[], optax.GradientTransformation] | None = None
  rule: Callable[[Config], Rule] | None = None
  blind: str = ""
  watched: bool = False
  probe: bool = True
  knows: bool = False
  raises: bool = False
  rewinds: bool = False
  moe: tuple[tuple[str, str | float], ...] = ()


NO_BIAS = ("bias_update", "none")
ARMS = {
  "none": Kind(clip=False),
  "clip": Kind(),
  "oracle": Kind(knows=True),
  "zclip": Kind(before=zclip),
  "adagc": Kind(clip=False, before=adagc),
  "skip_step": Kind(rule=lambda cfg: skip_step()),
  "rate_rules": Kind(rule=lambda cfg: rate_rules(LEAST_RATE / cfg.optimizer.learning_rate)),
  "reflex": Kind(mode="act"),
  "reflex-governor": Kind(mode="act", blind="rate"),
  "reflex-gradient": Kind(mode="act", blind="grads"),
  "ours": Kind(mode="act", watched=True),
  "ours-probe": Kind(mode="act", watched=True, probe=False),
}
# For the suites of experts, of low learning rates, and of the audit.
OTHER_ARMS = {
  "rewind": Kind(rule=lambda cfg: skip_step(), rewinds=True),
  "unbalanced": Kind(moe=(NO_BIAS, ("aux_loss", 0.0))),
  "switch": Kind(moe=(NO_BIAS, ("aux_loss", 0.01))),
  "ours+rate": Kind(mode="act", watched=True, raises=True),
}


def build_arm(name: str, cfg: Config) -> Arm:
  """Build an arm under the current mesh; nothing is compiled yet.

  Args:
    name: in `ARMS` or `OTHER_ARMS`.
    cfg: the resolved config of the suite; the arm's own settings replace some.
  """
  kind = (ARMS | OTHER_ARMS)[name]
  orchestrator = {"mode": kind.mode, "raise_learning_rate": kind.raises}
  cfg = dataclasses.replace(
    cfg,
    optimizer=cfg.optimizer if kind.clip else dataclasses.replace(cfg.optimizer, grad_clip=0.0),
    moe=dataclasses.replace(cfg.moe, **dict(kind.moe)),
    orchestrator=dataclasses.replace(cfg.orchestrator, **orchestrator),
  )
  program = make_program(cfg)
  if kind.before is not None:
    platform = program.device.platform
    tx = optax.chain(kind.before(), build_optimizer(cfg, platform).tx)
    program = dataclasses.replace(program, optimizer=Optimizer(tx, platform))
  program = with_faults(program)

  def supervise(probe: Batch, loop: Loop) -> Supervisor | NoSupervisor:
    if kind.rewinds:
      return Rewind()
    if not kind.watched:
      return NoSupervisor()
    probe_of_it = probe if kind.probe else None
    # A rate that the schedule has wrong is one that its user has set: nobody knows a right one.
    return Supervisor(program, probe_of_it, loop=loop, schedule=None)

  if kind.rule is not None:
    rule = kind.rule(cfg)
    return Arm(name, program, _ruled(program, rule), rule.init(), supervise)
  return Arm(name, program, _plain(program, kind), None, supervise, kind.knows)


def _plain(program: Program, kind: Kind) -> Step:
  """The production step; what an ablation takes away is taken from the state before it."""
  rules = program.training_rules(1)  # of all updates: no suite has layers that skip tokens

  def step(state: TrainState, memory: None, batch: Batch, fault: Fault):
    if kind.blind:
      assert state.reflex is not None
      untaught = jax.tree.map(jnp.zeros_like, getattr(state.reflex, kind.blind))
      if kind.blind == "rate":
        untaught = jnp.full_like(untaught, jnp.inf)
      reflex = state.reflex._replace(**{kind.blind: untaught})
      state = dataclasses.replace(state, reflex=reflex)
    state, metrics = program.train_step(state, batch, rules, fault)
    return state, memory, metrics

  return step


def _ruled(program: Program, rule: Rule) -> Step:
  rules = program.training_rules(1)

  def step(state: TrainState, memory: Any, batch: Batch, fault: Fault):
    rate = rule.rate(memory)
    fault = fault._replace(rate=fault.rate * rate)
    new, metrics = program.train_step(state, batch, rules, fault)
    memory, keep = rule.judge(memory, metrics["train/loss"], metrics["train/grad_norm"])
    take = lambda a, b: jnp.where(keep, a, b)
    kept = jax.tree.map(take, (new.model, new.opt_state), (state.model, state.opt_state))
    state = dataclasses.replace(new, model=kept[0], opt_state=kept[1])
    extra = jnp.stack([1.0 - keep.astype(jnp.float32), rate])
    values = jnp.concatenate([metrics.values, extra])
    return state, memory, StepMetrics(values, metrics.layers, metrics.names + RULE_METRICS)

  return jax.jit(step, donate_argnums=0)
