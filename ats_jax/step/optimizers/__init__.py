"""Optimizers: optax transformations that say what they keep of each parameter."""

from ats_jax.config.schema import Config
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.adamw import adamw
from ats_jax.step.optimizers.base import Optimizer


def build_optimizer(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """The optimizer of a run on a "cpu", "gpu" or "tpu"; `kernels` say what runs.

  Another one for some roles is an `optax.partition` here, by `model.param.roles`.
  """
  return adamw(cfg, platform, kernels)
