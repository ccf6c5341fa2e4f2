"""Everything a step changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import cut_as, trainable
from ats_jax.model.random import Purpose, fold
from ats_jax.step import tensors
from ats_jax.step.optimizers import Optimizer
from ats_jax.step.reduction import nothing_unsent
from ats_jax.step.reflex import Control, Reflex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """State of training; a step maps it to the next.

  Attributes:
    step: int32 scalar, updates done.
    model: the weights.
    opt_state: state of the optax chain.
    ema: averaged weights, or None (`optimizer.ema_decay`).
    key: root of all randomness; never split, only folded, see `model.random`.
    control: what the supervisor sets; None with `orchestrator.mode=off`.
    reflex: what the step remembers of earlier ones; None likewise.
    unsent: what the gradients of each replica have not got into an update yet, as they are sent in
      8 bits (`step.reduction`); None if nothing is compressed.
  """

  step: jax.Array
  model: Decoder
  opt_state: optax.OptState
  ema: Decoder | None
  key: jax.Array
  control: Control | None = None
  reflex: Reflex | None = None
  unsent: Any = None

  @property
  def weights(self) -> Decoder:
    """What evaluation and generation use: the average if there is one."""
    return self.model if self.ema is None else self.ema


def init_state(
  cfg: Config, num: Numerics, optimizer: Optimizer, *, abstract: bool = False
) -> TrainState:
  """Build the state of step 0, each array born in its sharding on the current mesh.

  Args:
    cfg: the resolved config.
    num: see `model.numerics.numerics`.
    optimizer: what is to train it.
    abstract: give shapes, dtypes and shardings only, without computing anything.
  """

  def init(key: jax.Array) -> TrainState:
    model: Any = Decoder(cfg, num, nnx.Rngs(params=fold(key, Purpose.INIT)))
    # float32, or a slow average would stop moving; copied, as the state is donated
    average = lambda p: jnp.array(p, jnp.float32, copy=True)
    ema = jax.tree.map(average, model) if cfg.optimizer.ema_decay else None
    opt_state = optimizer.tx.init(cut_as("moments", trainable(model)))
    unsent = nothing_unsent(cfg, model)
    state = TrainState(jnp.zeros((), jnp.int32), model, opt_state, ema, key, unsent=unsent)
    if cfg.orchestrator.mode == "off":
      return state
    control = Control.new(armed=cfg.orchestrator.mode == "act")
    reflex = Reflex.new(tensors.count(trainable(model)))
    return dataclasses.replace(state, control=control, reflex=reflex)

  make_key = lambda: jax.random.key(cfg.seed)
  if abstract:  # no device is used
    return jax.eval_shape(init, jax.eval_shape(make_key))
  return jax.jit(init)(make_key())
