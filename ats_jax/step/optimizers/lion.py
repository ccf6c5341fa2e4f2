"""Lion: the sign of an average of gradients."""

import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import Lion
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import (
  Optimizer,
  clipping,
  decoupled_decay,
  per_group,
)


def lion(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Clip, `optax.scale_by_lion`, decoupled weight decay."""
  del kernels
  o = cfg.optimizer
  assert isinstance(o, Lion)
  make = lambda b1, b2: optax.scale_by_lion(b1, b2, jnp.dtype(o.mu_dtype))
  tx = per_group(make, (o.b1_by_role, o.b1), (o.b2_by_role, o.b2))
  return Optimizer(optax.chain(*clipping(cfg, platform), tx, *decoupled_decay(cfg)), platform)
