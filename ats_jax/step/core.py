"""One optimizer update: gradients, new weights, the new state, metrics.

`step_function` makes a plain step. A feature beyond it is a `Part`, whose methods the step calls at
fixed points. `step.parts` lists the parts of a run; a dense run has none.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.param import gradient_shards, merge, trainable, with_gradient_shards
from ats_jax.model.random import Purpose, fold
from ats_jax.model.stats import StackStats
from ats_jax.step import tensors
from ats_jax.step.objective import Objective, Totals, batch_totals
from ats_jax.step.optimizers.base import Optimizer, seam
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import StepMetrics, TrainState

Schedule = Callable[[Config, jax.Array], jax.Array]
Metrics = dict[str, jax.Array]
# `(model, batch, totals, key, rules) -> (sums, statistics, gradients)`, as `sums_and_grads`.
Gradients = Callable[[Decoder, Batch, Totals, jax.Array, Pass], tuple[Any, StackStats, Any]]
# `(state, grads, lr, loss) -> (state, metrics)`, with new parameters and optimizer state.
Update = Callable[[TrainState, Any, jax.Array, jax.Array], tuple[TrainState, Metrics]]


class UpdateResult(NamedTuple):
  """The result of an update, as parts see it.

  Attributes:
    before: the state before the step.
    used: the model of the forward and backward passes (`Part.used_model`).
    rules: how its sparse layers chose.
    stats: statistics of its sparse layers, over the whole batch.
    metrics: metrics of the objective and of the update, by name.
  """

  before: TrainState
  used: Decoder
  rules: Pass
  stats: StackStats
  metrics: Metrics


class Part:
  """A feature of the step; a subclass overrides what it changes.

  The methods of all parts are called in the order of the list. Of `gradients` and `update` the
  first part's is the outermost: `inner` is what the parts behind it and the plain step do.
  """

  def init(self, state: TrainState) -> TrainState:
    """Add what the part remembers between steps to the state of step 0."""
    return state

  def used_model(self, state: TrainState, model: Decoder) -> Decoder:
    """Return the model for the passes of this step."""
    del state
    return model

  def used_totals(self, state: TrainState, totals: Totals) -> Totals:
    """Return the totals of the batch for the passes of this step."""
    del state
    return totals

  def gradients(
    self,
    inner: Gradients,
    model: Decoder,
    batch: Batch,
    totals: Totals,
    key: jax.Array,
    rules: Pass,
  ) -> tuple[Any, StackStats, Any]:
    """Compute sums, statistics and gradients as `sums_and_grads`, by calling `inner`."""
    return inner(model, batch, totals, key, rules)

  def update(
    self, inner: Update, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
  ) -> tuple[TrainState, Metrics]:
    """Update parameters and optimizer state as `update`, by calling `inner`."""
    return inner(state, grads, lr, loss)

  def after(self, result: UpdateResult, state: TrainState) -> TrainState:
    """Change the state after an update, beyond parameters and optimizer state."""
    del result
    return state

  def report(
    self, result: UpdateResult, state: TrainState, written: Any
  ) -> tuple[TrainState, Metrics]:
    """Return the state and further metrics of it.

    Args:
      result: the update.
      state: the state that the step returns.
      written: the parameters of `state` behind a barrier, for reductions over them.
    """
    del result, written
    return state, {}


def step_function(
  cfg: Config,
  optimizer: Optimizer,
  objective: Objective,
  parts: Sequence[Part] = (),
  schedule: Schedule = learning_rate,
) -> Callable[[TrainState, Batch, Pass], tuple[TrainState, StepMetrics]]:
  """The step `(state, batch [accum, batch, seq], rules) -> (state, metrics)`, to be traced.

  Args:
    cfg: the resolved config.
    optimizer: turns gradients into directions.
    objective: the loss and its metrics.
    parts: further features of the step (`step.parts.parts_of`).
    schedule: returns the learning rate of a step.
  """
  gradients: Gradients = functools.partial(sums_and_grads, objective)
  move: Update = functools.partial(update, optimizer)
  for part in reversed(parts):
    gradients = functools.partial(part.gradients, gradients)
    move = functools.partial(part.update, move)

  def train_step(before: TrainState, batch: Batch, rules: Pass) -> tuple[TrainState, StepMetrics]:
    used = before.model
    for part in parts:
      used = part.used_model(before, used)

    totals = batch_totals(batch, rules, objective)
    for part in parts:
      totals = part.used_totals(before, totals)
    key = fold(before.key, Purpose.PASS, before.step)
    sums, stats, grads = gradients(used, batch, totals, key, rules)
    means = objective.means(sums, totals)

    lr = schedule(cfg, before.step)
    state, of_update = move(before, grads, lr, means["train/loss"])
    result = UpdateResult(before, used, rules, stats, means | of_update)
    for part in parts:
      state = part.after(result, state)

    # Behind a barrier, so that XLA does not write parameters in float32 for the sake of this norm.
    written = jax.lax.optimization_barrier(trainable(state.model))
    metrics = result.metrics | {
      "train/param_norm": tensors.norm(written),
      "train/scheduled_rate": lr,
      "train/tokens": totals.counted,
    }
    for part in parts:
      state, further = part.report(result, state, written)
      metrics |= further
    return dataclasses.replace(state, step=before.step + 1), StepMetrics.of(metrics)

  return train_step


def sums_and_grads(
  objective: Objective, model: Decoder, batch: Batch, totals: Totals, key: jax.Array, rules: Pass
) -> tuple[Any, StackStats, Any]:
  """Accumulate sums, statistics and gradients of the objective over the micro-batches.

  Micro-batches run one after the other, or in one pass if the stack joins them (`Stack.join`).

  Returns:
    The objective's sums, statistics of the sparse layers, and gradients like `trainable(model)`,
    sharded as the plan in use says.
  """
  params: Any = trainable(model)
  shards = gradient_shards(params)

  def contribution(shards: Any, micro: Batch, micro_key: jax.Array):
    used = merge(with_gradient_shards(shards, params), model)
    part = objective(used, micro, totals, rules, micro_key)
    return totals.scaled(part.loss), (part.sums, part.stats)

  def of_rows(rows: Batch, rows_key: jax.Array):
    part = jax.grad(contribution, has_aux=True)
    grads, (sums, stats) = part(shards, rows, rows_key)
    return sums, stats, grads

  joined = model.num.stack.join(dict(batch))
  if joined is not None:
    return of_rows(joined, key)

  def of_micro(index: jax.Array | int, micro: Batch):
    return of_rows(micro, jax.random.fold_in(key, index))

  accum = batch["tokens"].shape[0]
  first = {k: v[0] for k, v in batch.items()}
  if accum == 1:  # no second copy of the gradients
    return of_micro(0, first)

  def micro_step(carry, index_and_micro):
    sums, stats, grads = of_micro(*index_and_micro)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return jax.tree.map(jnp.add, carry, (sums, stats, grads)), None

  zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), shards)
  sums, stats, _ = jax.eval_shape(of_micro, 0, first)
  start = (*jax.tree.map(jnp.zeros_like, (sums, stats)), zeros)
  carry, _ = jax.lax.scan(micro_step, start, (jnp.arange(accum), dict(batch)))
  return carry


def update(
  optimizer: Optimizer, state: TrainState, grads: Any, lr: jax.Array, loss: jax.Array
) -> tuple[TrainState, Metrics]:
  """Update parameters and optimizer state.

  Args:
    optimizer: turns gradients into directions.
    state: the state before the step.
    grads: gradients, like `trainable(state.model)`.
    lr: the learning rate of the schedule, float32 scalar.
    loss: the loss of the batch, which parts may use.

  Returns:
    The state with new parameters and optimizer state, and train/grad_norm (before clipping),
    train/update_norm (of what was added to the parameters) and train/learning_rate.
  """
  del loss
  grads, lr = seam((grads, lr), optimizer.platform)
  params: Any = trainable(state.model)  # optax has no type for "any pytree"
  moved = optimizer.update(params, grads, state.opt_state, lr)
  model = merge(moved.params, state.model)
  return dataclasses.replace(state, model=model, opt_state=moved.opt_state), {
    "train/grad_norm": tensors.norm(grads),
    "train/update_norm": moved.update_norm,
    "train/learning_rate": lr,
  }


def without_update(before: TrainState, state: TrainState, skipped: jax.Array) -> TrainState:
  """`state` with all that an update changes beside parameters and optimizer state as it was before.

  Args:
    before: the state before the step.
    state: the state after the update.
    skipped: bool, whether the update was left out; if not, `state` stays.
  """
  old = merge(trainable(state.model), before.model), before.ema, before.unsent
  take = functools.partial(jnp.where, skipped)
  model, ema, unsent = jax.tree.map(take, old, (state.model, state.ema, state.unsent))
  return dataclasses.replace(state, model=model, ema=ema, unsent=unsent)
