"""Schedule-Free AdamW: averaged weights in place of a schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import ScheduleFree
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import (
  Optimizer,
  clipping,
  decoupled_decay,
  per_group,
  recount,
  state_of,
)


def schedule_free(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Clip, then `optax.contrib.schedule_free` of RMSProp with decoupled weight decay.

  The weights that are trained are the paper's y, at which gradients are taken; the state holds its
  z. Evaluation, generation and exports use its x (`Optimizer.average`).
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, ScheduleFree)
  rms = lambda b2: optax.scale_by_rms(b2, o.eps, eps_in_sqrt=False, bias_correction=True)
  base = optax.chain(per_group(rms, (o.b2_by_role, o.b2)), *decoupled_decay(cfg))

  def averaging(learning_rate: jax.Array | float) -> optax.GradientTransformationExtraArgs:
    descent = optax.chain(base, optax.scale(-jnp.asarray(learning_rate, jnp.float32)))
    return contrib.schedule_free(descent, learning_rate, o.b1, o.weight_power, jnp.float32)

  def update(updates, state, params=None, *, learning_rate: jax.Array | float = 1.0, **extra):
    moves, state = averaging(learning_rate).update(updates, state, params, **extra)
    # The rate is divided out, which whoever moves the weights multiplies with. At 0 nothing moves.
    rate = jnp.where(jnp.asarray(learning_rate) > 0, learning_rate, 1.0)
    return jax.tree.map(lambda move: -move / rate, moves), state

  tx = optax.GradientTransformationExtraArgs(averaging(1.0).init, update)
  return Optimizer(
    optax.chain(*clipping(cfg, platform), tx),
    platform,
    recount=recount,
    average=averaged,
  )


def averaged(params: Any, opt_state: optax.OptState) -> Any:
  """The paper's x of its y and z."""
  return contrib.schedule_free_eval_params(state_of(contrib.ScheduleFreeState, opt_state), params)
