"""One optimizer update."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.model.param import cut_as, lent, merge, shards_of_gradients, trainable
from ats_jax.model.random import Purpose, fold
from ats_jax.model.stats import StackStats
from ats_jax.sharding.pipeline import join, num_stages
from ats_jax.step import tensors
from ats_jax.step.balance import (
  Totals,
  drop_experts,
  totals,
  with_buffers,
)
from ats_jax.step.compiler import Options
from ats_jax.step.metrics import StepMetrics, step_metrics
from ats_jax.step.objective import Objective
from ats_jax.step.optimizers.base import Optimizer
from ats_jax.step.phases import renewed
from ats_jax.step.reduction import over_replicas
from ats_jax.step.schedule import learning_rate
from ats_jax.step.state import TrainState
from ats_jax.step.update import guarded_update, update

Schedule = Callable[[Config, jax.Array], jax.Array]


def make_train_step(
  cfg: Config, optimizer: Optimizer, objective: Objective, options: Options | None = None
) -> jax.stages.Wrapped:
  """Return the jitted step `(state, batch [accum, batch, seq], rules) -> (state, metrics)`.

  The state is donated. `objective` is what is minimised; `rules` are those of the update
  (`Program.training_rules`); `options` are the compiler's.
  """
  step = step_function(cfg, optimizer, objective)
  return jax.jit(step, donate_argnums=0, static_argnames="rules", compiler_options=options or None)


def step_function(
  cfg: Config, optimizer: Optimizer, objective: Objective, schedule: Schedule = learning_rate
) -> Callable[[TrainState, Batch, Pass], tuple[TrainState, StepMetrics]]:
  """The step of `make_train_step`, to be traced; `schedule` gives the learning rate of a step."""

  def train_step(state: TrainState, batch: Batch, rules: Pass) -> tuple[TrainState, StepMetrics]:
    state = renewed(cfg, optimizer, state, state.step)
    whole = totals(batch, rules)
    key = fold(state.key, Purpose.PASS, state.step)
    used = state.model
    if state.control is not None and cfg.moe.num_experts:
      drop_key = fold(state.key, Purpose.EXPERT_DROPOUT, state.step)
      used = drop_experts(cfg, used, state.control.expert_dropout, drop_key)
    of_rows = functools.partial(sums_and_grads, objective, rules=rules)
    sums, stats, grads, unsent = over_replicas(of_rows, used, batch, whole, key, state.unsent)

    # As the optimizer's state is sharded: each device updates what it has the moments of.
    params: Any = cut_as("moments", trainable(state.model))  # optax has no type for "any pytree"
    grads = cut_as("moments", grads)
    lr = schedule(cfg, state.step)
    control, reflex = state.control, state.reflex
    loss, accuracy, z, *further = objective.means(sums, whole)
    if control is None or reflex is None:
      new = update(optimizer, params, grads, state.opt_state, lr)
    else:
      new = guarded_update(optimizer, params, grads, state.opt_state, lr, loss, control, reflex)
    moved = merge(cut_as("weights", new.params), state.model)
    model = with_buffers(cfg, moved, stats, state.step, rules, used)
    follow = lambda e, p: e + (1.0 - cfg.optimizer.ema_decay) * (p.astype(e.dtype) - e)
    ema = None if state.ema is None else jax.tree.map(follow, state.ema, model)
    if new.accept is not None:
      take = functools.partial(jnp.where, new.accept)
      before = moved, state.ema, state.unsent
      model, ema, unsent = jax.tree.map(take, (model, ema, unsent), before)

    # Behind a barrier, so that XLA does not write parameters in float32 for the sake of this norm.
    written = jax.lax.optimization_barrier(trainable(model))
    scalars = (
      loss,
      accuracy,
      z,
      new.grad_norm,
      new.update_norm,
      tensors.norm(written),
      new.rate,
      lr,
      whole.counted,
    )
    report = (*new.report, state.step) if new.report else ()
    metrics = step_metrics(cfg, model, stats, scalars, (*report, *further))
    after = new.reflex
    if after is not None:
      after = after._replace(written=tensors.checksums(written), knows=jnp.asarray(True))
    rest = state.key, control, after, unsent
    return TrainState(state.step + 1, model, new.opt_state, ema, *rest), metrics

  return train_step


def sums_and_grads(
  objective: Objective, model: Decoder, batch: Batch, whole: Totals, key: jax.Array, rules: Pass
) -> tuple[Any, StackStats, Any]:
  """Accumulate sums, statistics and gradients of the objective over the micro-batches.

  One after the other; with a pipeline the stages of the model take them all in one pass.

  Returns:
    The objective's sums, statistics of the sparse layers, and gradients like `trainable(model)`,
    sharded as the plan in use says.
  """
  params: Any = trainable(model)
  shards = shards_of_gradients(params)

  def contribution(shards: Any, micro: Batch, micro_key: jax.Array):
    used = merge(lent(shards, params), model)
    part = objective(used, micro, whole, rules, micro_key)
    return part.loss, (part.sums, part.stats)

  def of_rows(rows: Batch, rows_key: jax.Array):
    part = jax.grad(contribution, has_aux=True)
    grads, (sums, stats) = part(shards, rows, rows_key)
    return sums, stats, grads

  if num_stages() > 1:
    return of_rows({name: join(x) for name, x in batch.items()}, key)

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
