"""Adafactor: second moments of matrices by their rows and columns."""

import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import Adafactor
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import (
  Optimizer,
  clipping,
  decoupled_decay,
  per_tensor,
  recount,
)


def adafactor(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Clip, the links of `optax.adafactor` for each tensor of a stack, decoupled weight decay.

  Decay is multiplied with the learning rate, as in the other optimizers here; optax's is not.
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, Adafactor)
  links = [
    optax.scale_by_factored_rms(
      decay_rate=o.decay_power, min_dim_size_to_factor=o.least_factored, epsilon=o.eps
    )
  ]
  if o.clip_rms:
    links.append(optax.clip_by_block_rms(o.clip_rms))
  if o.scale_by_size:
    links.append(optax.scale_by_param_block_rms())
  if o.momentum:
    links.append(optax.ema(o.momentum, debias=False))
  tx = per_tensor(optax.chain(*links))
  return Optimizer(
    optax.chain(*clipping(cfg, platform), tx, *decoupled_decay(cfg)),
    platform,
    recount=recount,
  )
