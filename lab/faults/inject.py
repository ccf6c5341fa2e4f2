"""Faults of the gradient and of the learning rate, around the production step.

The gradient is that of an objective times a factor, the rate that of an optimizer whose directions
are longer than it says: the step knows of neither. A rate that is wrong in production is wrong in
the schedule: then all that the step reports and bounds has it from there.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from ats_jax.data.batch import Batch, Field
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.step.core import step_function
from ats_jax.step.objective import Contribution, Objective, Totals
from ats_jax.step.parts import parts_of
from ats_jax.step.program import Program
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import StepMetrics, TrainState


class Fault(NamedTuple):
  """What goes wrong in a step; float32 scalars.

  Attributes:
    gradient: multiplies the gradients; may be NaN.
    rate: multiplies the learning rate, unknown to the schedule and to metrics.
    schedule: multiplies the schedule's rate.
  """

  gradient: jax.Array
  rate: jax.Array
  schedule: jax.Array | float = 1.0


def with_faults(program: Program) -> Program:
  """A program whose train step takes a `fault` beside its arguments; without one it is the same."""
  assert program.optimizer.fused is None, "a fused optimizer has no directions to multiply"

  def train_step(
    state: TrainState, batch: Batch, rules: Pass, fault: Fault | None = None
  ) -> tuple[TrainState, StepMetrics]:
    optimizer, objective, schedule = program.optimizer, program.objective, learning_rate
    if fault is not None:
      schedule = lambda cfg, step: learning_rate(cfg, step) * fault.schedule
      optimizer = dataclasses.replace(optimizer, tx=_longer(optimizer.tx, fault.rate))
      objective = _Steeper(objective, fault.gradient)
    parts = parts_of(program.cfg, optimizer)
    return step_function(program.cfg, optimizer, objective, parts, schedule)(state, batch, rules)

  options = program.options or None
  step = jax.jit(train_step, donate_argnums=0, static_argnames="rules", compiler_options=options)
  return dataclasses.replace(program, train_step=step)


def _longer(
  tx: optax.GradientTransformation, factor: jax.Array
) -> optax.GradientTransformationExtraArgs:
  """`tx`, its directions times a factor."""
  inner = optax.with_extra_args_support(tx)

  def update(updates: Any, state: optax.OptState, params: Any = None, **extra: Any):
    directions, state = inner.update(updates, state, params, **extra)
    return jax.tree.map(lambda d: d * factor.astype(d.dtype), directions), state

  return optax.GradientTransformationExtraArgs(tx.init, update)


class _Steeper:
  """An objective, its gradients times a factor; what it reports is the same."""

  def __init__(self, objective: Objective, factor: jax.Array):
    self.means = objective.means
    self._objective, self._factor = objective, factor

  @property
  def fields(self) -> Mapping[str, Field]:
    """See `Objective`."""
    return self._objective.fields

  def __call__(
    self, model: Decoder, batch: Batch, totals: Totals, rules: Pass, key: jax.Array | None
  ) -> Contribution:
    part = self._objective(model, batch, totals, rules, key)
    return part._replace(loss=part.loss * self._factor)
