"""Learning rate as a function of the step."""

import math
from typing import Any

import jax.numpy as jnp

from ats_jax.config.schema import Config


def learning_rate(cfg: Config, step: Any, xp: Any = jnp) -> Any:
  """Learning rate of update `step` (0-based); with jax.numpy a jax.Array in float32.

  Warm-up rises linearly from lr/warmup on the first update, so that none is wasted at 0. After
  it, `p` runs from 0 to 1 over the rest of the run and stays at 1.

  Args:
    cfg: `optimizer` and `num_steps`.
    step: int32 scalar, or array with numpy.
    xp: jax.numpy, or numpy to compute it on the host.
  """
  o, warmup = cfg.optimizer, warmup_steps(cfg)
  t = xp.asarray(step, xp.float32)
  p = xp.clip((t - warmup) / max(1, cfg.num_steps - 1 - warmup), 0.0, 1.0)
  shape = _shape(o.schedule, p, warmup, cfg, xp)
  rise = xp.minimum(1.0, (t + 1.0) / max(1, warmup))
  return xp.asarray(o.learning_rate, xp.float32) * rise * shape


def warmup_steps(cfg: Config) -> int:
  """Steps in which the learning rate rises at first."""
  o = cfg.optimizer
  warmup = o.warmup_steps or round(o.warmup_fraction * cfg.num_steps)
  if o.schedule == "one_cycle" and not warmup:
    return max(1, round(0.3 * cfg.num_steps))  # Smith & Topin 2018: a cycle rises first
  return warmup


def decay_from(cfg: Config, step: int) -> int:
  """The `num_steps` with which a WSD schedule begins to decay after `step`."""
  return math.ceil((step + 1) / (1 - cfg.optimizer.decay_fraction))


def _shape(name: str, p: Any, warmup: int, cfg: Config, xp: Any) -> Any:
  """Factor in [final_lr_fraction, 1] at progress `p`."""
  final = cfg.optimizer.final_lr_fraction
  if name in ("constant", "none"):
    return xp.ones_like(p)
  if name == "linear":
    return 1.0 - (1.0 - final) * p
  if name in ("cosine", "one_cycle"):
    return final + (1.0 - final) * 0.5 * (1.0 + xp.cos(xp.pi * p))
  if name == "rex":  # Chen et al. 2021, arXiv:2107.04197, eq. 1
    return final + (1.0 - final) * (1.0 - p) / (0.5 + 0.5 * (1.0 - p))
  assert name == "wsd", name  # warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395
  # The decay never begins before the warm-up ends.
  length = min(1.0, cfg.optimizer.decay_fraction * cfg.num_steps / max(1, cfg.num_steps - warmup))
  down = xp.clip((p - (1.0 - length)) / max(length, 1e-9), 0.0, 1.0)
  return 1.0 - (1.0 - final) * down
