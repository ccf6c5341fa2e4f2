"""Faults of a step, around the production step.

A schedule that is computed wrongly multiplies the rate that the whole step has. A fault of the
step's own computation makes a part of one tensor wrong where the step computes it: the weights that
the passes use, activations, gradients after their reduction, or the optimizer's directions. All is
traced: one compiled program has every fault, and none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import merge, trainable
from ats_jax.model.stats import StackStats
from ats_jax.step.core import Gradients, Part, step_function
from ats_jax.step.optimizers import Optimizer
from ats_jax.step.parts import parts_of
from ats_jax.step.program import Program
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import StepMetrics, TrainState

PLACES = ("nowhere", "weights", "activations", "gradients", "updates")
WAYS = ("scale", "shift", "flip", "old")


class Fault(NamedTuple):
  """Numbers that are wrong in a step; float32 scalars."""

  gradient: jax.Array | float = 1.0  # multiplies the gradients; may be NaN
  rate: jax.Array | float = 1.0  # multiplies the directions: neither schedule nor metrics know it
  schedule: jax.Array | float = 1.0  # multiplies the schedule's rate


class Miscomputed(NamedTuple):
  """A part of what a step computes is wrong.

  The places are the weights that both passes use (a matmul, an all-gather), the last activations,
  gradients after their reduction, and directions of the optimizer. What is wrong is multiplied by
  `amount`, shifted by so many numbers, has bit `amount` of the first one flipped, or is `old`.
  """

  place: Any = 0  # in `PLACES`
  way: Any = 0  # in `WAYS`
  first: Any = 0.0  # share of the numbers of the place, tensor by tensor, at which it begins
  last: Any = 1.0  # share at which it ends
  amount: Any = 1.0  # may be NaN

  def on_device(self) -> "Miscomputed":
    """The numbers as arrays, so that no value is compiled in."""
    kinds = (np.int32, np.int32, np.float32, np.float32, np.float32)
    return Miscomputed(*(kind(x) for kind, x in zip(kinds, self, strict=True)))

  def of(self, place: str, tree: Any, old: Any = None) -> Any:
    """The arrays of a place, computed wrongly if it is this one; `old` has their former values."""
    wrong = lambda tree: self._of(tree, tree if old is None else old)
    return jax.lax.cond(self.place == PLACES.index(place), wrong, lambda tree: tree, tree)

  def _of(self, tree: Any, old: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    x, former = _joined(leaves), _joined(jax.tree.leaves(old))
    first = jnp.minimum(jnp.round(self.first * x.size).astype(jnp.int32), x.size - 1)
    last = jnp.maximum(jnp.round(self.last * x.size).astype(jnp.int32), first + 1)
    number = jnp.arange(x.size, dtype=jnp.int32)
    whole = jnp.nan_to_num(self.amount).astype(jnp.int32)
    shifted = x[first + (number - first - whole) % (last - first)]
    mask = jnp.left_shift(jnp.uint32(1), jnp.clip(whole, 0, 31).astype(jnp.uint32))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ mask
    flipped = jnp.where(number == first, jax.lax.bitcast_convert_type(bits, jnp.float32), x)
    found = jax.lax.select_n(self.way, x * self.amount, shifted, flipped, former)
    found = jnp.where((number >= first) & (number < last), found, x)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = zip(jnp.split(found, ends), leaves, strict=True)
    like = lambda part, leaf: part.reshape(leaf.shape).astype(leaf.dtype)
    put = lambda part, leaf: jax.sharding.reshard(like(part, leaf), jax.typeof(leaf).sharding)
    return structure.unflatten([put(*pair) for pair in parts])


def _joined(leaves: list[jax.Array]) -> jax.Array:
  whole = [jax.sharding.reshard(x, jax.sharding.PartitionSpec()) for x in leaves]
  return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in whole])


def with_faults(program: Program) -> Program:
  """A program whose train step takes a `fault`, and what is `wrong` with weights that are `old`.

  Without them it is the same program.
  """
  assert program.optimizer.fused is None, "a fused optimizer has no directions to multiply"

  def train_step(
    state: TrainState,
    batch: Batch,
    rules: Pass,
    fault: Fault | None = None,
    wrong: Miscomputed | None = None,
    old: Any = None,
  ) -> tuple[TrainState, StepMetrics]:
    optimizer, schedule = program.optimizer, learning_rate
    objective: Any = program.objective
    if fault is not None:
      schedule = lambda cfg, step: learning_rate(cfg, step) * fault.schedule
      longer = lambda tree: jax.tree.map(lambda d: d * fault.rate, tree)
      optimizer = _with_directions(optimizer, longer)
      objective = _Around(objective, lambda part: part._replace(loss=part.loss * fault.gradient))
    if wrong is not None:
      optimizer = _with_directions(optimizer, lambda tree: wrong.of("updates", tree))
      activations = lambda out: (wrong.of("activations", out[0]), out[1])
      objective = _Around(objective, lambda part: part, lambda model: _Around(model, activations))
    parts = parts_of(program.cfg, optimizer)
    parts = parts if wrong is None else (*parts, _Passes(wrong, old))
    return step_function(program.cfg, optimizer, objective, parts, schedule)(state, batch, rules)

  options = program.options or None
  step = jax.jit(train_step, donate_argnums=0, static_argnames="rules", compiler_options=options)
  return dataclasses.replace(program, train_step=step)


def _with_directions(optimizer: Optimizer, change: Callable[[Any], Any]) -> Optimizer:
  inner = optax.with_extra_args_support(optimizer.tx)

  def update(updates: Any, state: optax.OptState, params: Any = None, **extra: Any):
    directions, state = inner.update(updates, state, params, **extra)
    return change(directions), state

  tx = optax.GradientTransformationExtraArgs(inner.init, update)
  return dataclasses.replace(optimizer, tx=tx)


class _Passes(Part):
  """Weights that the passes use, and gradients that come of them."""

  def __init__(self, wrong: Miscomputed, old: Any):
    self._wrong, self._old = wrong, old

  @override
  def used_model(self, state: TrainState, model: Decoder) -> Decoder:
    return merge(self._wrong.of("weights", trainable(model), self._old), model)

  @override
  def gradients(self, inner: Gradients, *args: Any, **kwargs: Any) -> tuple[Any, StackStats, Any]:
    sums, stats, grads = inner(*args, **kwargs)
    return sums, stats, self._wrong.of("gradients", grads)


class _Around:
  """Like the attribute or the value of a call of something, but for what `change` does to calls."""

  def __init__(self, inner: Any, change: Callable[[Any], Any], argument: Callable | None = None):
    self._inner, self._change, self._argument = inner, change, argument

  def __getattr__(self, name: str) -> Any:
    return getattr(self._inner, name)

  def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
    first = first if self._argument is None else self._argument(first)
    return self._change(self._inner(first, *args, **kwargs))
