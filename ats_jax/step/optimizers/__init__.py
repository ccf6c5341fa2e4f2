"""Optimizers: optax transformations that say what they keep of each parameter."""

from ats_jax.config.schema import Config
from ats_jax.extensions import optimizers
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import Optimizer


def build_optimizer(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """The optimizer of a run on a "cpu", "gpu" or "tpu"; `kernels` say what runs.

  One is registered as (cfg, platform, kernels) -> `Optimizer`, beside its settings
  (`config.schema.optimizer`).

  Raises:
    ValueError: if `optimizer.name` is none, or what it makes is none.
  """
  made = optimizers.find(cfg.optimizer.name)(cfg, platform, kernels)
  if not isinstance(made, Optimizer):
    raise ValueError(
      f"optimizer.name={cfg.optimizer.name} made {made!r:.80}: expected an "
      "ats_jax.step.optimizers.base.Optimizer, which holds the whole chain. "
      "docs/guides/extending.md shows one."
    )
  return made
