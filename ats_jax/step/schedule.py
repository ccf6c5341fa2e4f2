"""Schedules: the learning rate as a function of the step."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.config.schema.mixture import has_rates, phases_of, steps_of
from ats_jax.config.schema.schedule import Falling, WarmupStableDecay
from ats_jax.extensions import schedules


def learning_rate(cfg: Config, step: Any, xp: Any = jnp) -> Any:
  """The learning rate of update `step` (0-based); with jax.numpy a jax.Array in float32.

  Warm-up rises linearly from lr/warmup on the first update, so that none is wasted at 0. After
  it, `p` runs from 0 to 1 over the rest of the run and stays at 1. Phases with a learning
  rate have such a schedule each.

  Args:
    cfg: the config, of which `optimizer`, `num_steps` and the phases of `data` are read.
    step: int32 scalar, or array with numpy.
    xp: jax.numpy, or numpy to compute it on the host.
  """
  (_, first), *later = phases(cfg)
  rate = _rate(first, step, xp)
  for start, own in later:
    rate = xp.where(step >= start, _rate(own, step - start, xp), rate)
  return rate


def phases(cfg: Config) -> list[tuple[int, Config]]:
  """The first update of each part of a run with a schedule of its own, and a config of that part.

  Its `num_steps` are those of the part, and its `optimizer` has the peak and the warm-up.
  """
  if not has_rates(cfg.data):
    return [(0, cfg)]
  result, starts = [], phase_starts(cfg)
  ends = (*starts[1:], max(cfg.num_steps, starts[-1] + 1))
  for start, end, phase in zip(starts, ends, cfg.data.phases, strict=True):
    optimizer = dataclasses.replace(
      cfg.optimizer,
      learning_rate=phase.learning_rate,
      warmup_steps=phase.warmup_steps,
      warmup_fraction=0.0,
    )
    result.append((start, dataclasses.replace(cfg, optimizer=optimizer, num_steps=end - start)))
  return result


def phase_starts(cfg: Config) -> tuple[int, ...]:
  """The first update (0-based) of each phase of `data`; phase lengths must not be in epochs."""
  data = cfg.data
  before = phases_of(data)[:-1]
  lengths = (steps_of(phase, data.batch_size, data.seq_len, 0) for phase in before)
  return tuple(itertools.accumulate(lengths, initial=0))


def _rate(cfg: Config, step: Any, xp: Any) -> Any:
  """The learning rate of one schedule: a config without phases, or one phase."""
  o, warmup = cfg.optimizer, warmup_steps(cfg)
  t = xp.asarray(step, xp.float32)
  p = xp.clip((t - warmup) / max(1, cfg.num_steps - 1 - warmup), 0.0, 1.0)
  shape = schedules.find(o.schedule.name)(p, cfg, xp)
  rise = xp.minimum(1.0, (t + 1.0) / max(1, warmup))
  return xp.asarray(o.learning_rate, xp.float32) * rise * shape


def warmup_steps(cfg: Config) -> int:
  """The number of warm-up steps."""
  o = cfg.optimizer
  warmup = o.warmup_steps or round(o.warmup_fraction * cfg.num_steps)
  if o.schedule.name == "one_cycle" and not warmup:
    return max(1, round(0.3 * cfg.num_steps))  # Smith & Topin 2018: a cycle rises first
  return warmup


def phase(cfg: Config, step: int) -> int:
  """What the learning rate does at update `step` (1-based): 0 warms up, 1 is stable, 2 decays."""
  start, own = [part for part in phases(cfg) if part[0] < step][-1]
  at = step - 1 - start
  rate, following = (float(_rate(own, number, np)) for number in (at, at + 1))
  if at < warmup_steps(own) or following > rate:
    return 0
  return 2 if following < rate or rate < 0.999 * own.optimizer.learning_rate else 1


def decay_from(cfg: Config, step: int) -> int:
  """The `num_steps` with which the decay of a WSD schedule begins after `step`."""
  schedule = cfg.optimizer.schedule
  assert isinstance(schedule, WarmupStableDecay)
  return math.ceil((step + 1) / (1 - schedule.decay_fraction))


def _final(cfg: Config) -> float:
  """The final learning rate of a falling schedule, as a share of the peak."""
  schedule = cfg.optimizer.schedule
  assert isinstance(schedule, Falling)
  return schedule.final_fraction


# A schedule is (progress, cfg, xp) -> factor. Progress runs from 0 at the end of the warm-up to 1
# at the end of the run; the factor multiplies the peak rate. `xp` is jax.numpy, or numpy on the
# host: use its functions. They are registered beside their settings, in `config.schema.schedule`.


def constant(p: Any, cfg: Config, xp: Any) -> Any:
  """The peak to the end."""
  del cfg
  return xp.ones_like(p)


def linear(p: Any, cfg: Config, xp: Any) -> Any:
  """A straight line."""
  del xp
  return 1.0 - (1.0 - _final(cfg)) * p


def cosine(p: Any, cfg: Config, xp: Any) -> Any:
  """Half a period of a cosine."""
  final = _final(cfg)
  return final + (1.0 - final) * 0.5 * (1.0 + xp.cos(xp.pi * p))


def rex(p: Any, cfg: Config, xp: Any) -> Any:
  """Reflected exponential (Chen et al. 2021, arXiv:2107.04197, eq. 1)."""
  del xp
  final = _final(cfg)
  return final + (1.0 - final) * (1.0 - p) / (0.5 + 0.5 * (1.0 - p))


def warmup_stable_decay(p: Any, cfg: Config, xp: Any) -> Any:
  """The peak, then a straight line down (Hu et al. 2024, arXiv:2404.06395)."""
  schedule, warmup = cfg.optimizer.schedule, warmup_steps(cfg)
  assert isinstance(schedule, WarmupStableDecay)
  # The decay never begins before the warm-up ends.
  length = min(1.0, schedule.decay_fraction * cfg.num_steps / max(1, cfg.num_steps - warmup))
  down = xp.clip((p - (1.0 - length)) / max(length, 1e-9), 0.0, 1.0)
  return 1.0 - (1.0 - schedule.final_fraction) * down
