"""Clips of the gradient, as published: optax transformations in front of Adam."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.step.tensors import norm


class ClipState(NamedTuple):
  """How many gradients were seen, and statistics of their norms."""

  seen: jax.Array
  stats: Any


def zclip(
  decay: float = 0.97, z_max: float = 2.5, warmup: int = 25, eps: float = 1e-6
) -> optax.GradientTransformation:
  """ZClip (Kumar et al. 2025, arXiv:2504.02507) with the defaults of its authors' code.

  A norm more than `z_max` sigmas above the mean is clipped to mean + z_max * std * (z_max / z).
  The statistics take in the clipped norm. Until `warmup` norms are seen, nothing is clipped.
  """
  init = lambda params: ClipState(jnp.zeros((), jnp.int32), jnp.zeros(2))  # mean and variance

  def update(updates, state, params=None):
    size, (old_mean, old_var) = norm(updates), state.stats
    std = jnp.sqrt(old_var)
    z = (size - old_mean) / (std + eps)
    is_warm = state.seen >= warmup
    spike = is_warm & (z > z_max)
    target = jnp.where(spike, old_mean + z_max * std * (z_max / z), size)
    # Welford's recurrence gives mean and variance of the warm-up's norms.
    n = state.seen + 1
    off = size - old_mean
    first_mean = old_mean + off / n
    first_var = (old_var * state.seen + off * (size - first_mean)) / n
    mean = decay * old_mean + (1.0 - decay) * target
    var = decay * old_var + (1.0 - decay) * jnp.square(target - mean)
    stats = jnp.where(is_warm, jnp.stack([mean, var]), jnp.stack([first_mean, first_var]))
    scale = jnp.where(spike, target / (size + eps), 1.0)
    return jax.tree.map(lambda g: g * scale, updates), ClipState(n, stats)

  return optax.GradientTransformation(init, update)


def adagc(
  absolute: float = 1.0, relative: float = 1.05, decay: float = 0.98, warmup: int = 100
) -> optax.GradientTransformation:
  """AdaGC (Wang et al. 2025, arXiv:2502.11034, algorithm 1): each tensor by its own history.

  During `warmup`, the global norm is clipped to `absolute`, and the level of a tensor is the least
  clipped norm seen. Then a tensor's norm is clipped to `relative` times its level, the decaying
  mean of its clipped norms. Layers stacked for a scan are tensors of their own.
  """

  def norms(tree):
    def one(path, x):
      stacked = ".segments" in jax.tree_util.keystr(path)
      axes = tuple(range(int(stacked), x.ndim))
      return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))

    return jax.tree_util.tree_map_with_path(one, tree)

  zeros = lambda tree: jax.tree.map(jnp.zeros_like, norms(tree))
  init = lambda params: ClipState(jnp.zeros((), jnp.int32), zeros(params))

  def update(updates, state, params=None):
    warming = state.seen < warmup
    whole = jnp.minimum(1.0, absolute / norm(updates))
    sizes = norms(updates)

    bound = lambda size, level: jnp.minimum(1.0, relative * level / (size + 1e-30))
    scales = jax.tree.map(lambda *at: jnp.where(warming, whole, bound(*at)), sizes, state.stats)

    def level_of(level, size, scale):
      clipped = size * scale
      least = jnp.where(state.seen == 0, clipped, jnp.minimum(level, clipped))
      return jnp.where(warming, least, decay * level + (1.0 - decay) * clipped)

    levels = jax.tree.map(level_of, state.stats, sizes, scales)
    clipped = jax.tree.map(lambda g, scale: (g * scale).astype(g.dtype), updates, scales)
    return clipped, ClipState(state.seen + 1, levels)

  return optax.GradientTransformation(init, update)
