"""What others do about faults, as published: two clips of the gradient and two rules on the step.

The clips are optax transformations in front of Adam. The rules wrap the production step: they see
its loss and its gradient's norm, and may undo it or change the next learning rate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.step.tensors import norm


class ZClipState(NamedTuple):
  """Moments of the gradient's norm; scalars. `mean` and `var` are sums until the warm-up ends."""

  seen: jax.Array
  mean: jax.Array
  var: jax.Array


def zclip(
  decay: float = 0.97, z_max: float = 2.5, warmup: int = 25, eps: float = 1e-6
) -> optax.GradientTransformation:
  """ZClip (Kumar et al. 2025, arXiv:2504.02507) with the defaults of its authors' code.

  A norm more than `z_max` sigmas above the mean is clipped to mean + z_max * std * (z_max / z).
  The statistics take in the clipped norm. Until `warmup` norms are seen, nothing is clipped.
  """

  def init(params):
    del params
    return ZClipState(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))

  def update(updates, state, params=None):
    del params
    size = norm(updates)
    std = jnp.sqrt(state.var)
    z = (size - state.mean) / (std + eps)
    is_warm = state.seen >= warmup
    spike = is_warm & (z > z_max)
    target = jnp.where(spike, state.mean + z_max * std * (z_max / z), size)

    # Welford's recurrence gives mean and variance of the warm-up's norms.
    n = state.seen + 1
    off = size - state.mean
    first_mean = state.mean + off / n
    first_var = (state.var * state.seen + off * (size - first_mean)) / n
    mean = decay * state.mean + (1.0 - decay) * target
    var = decay * state.var + (1.0 - decay) * jnp.square(target - mean)
    new = ZClipState(n, jnp.where(is_warm, mean, first_mean), jnp.where(is_warm, var, first_var))
    scale = jnp.where(spike, target / (size + eps), 1.0)
    return jax.tree.map(lambda g: g * scale, updates), new

  return optax.GradientTransformation(init, update)


class AdaGCState(NamedTuple):
  """`level`: for each tensor, the decaying mean of its clipped norms."""

  seen: jax.Array
  level: Any


def adagc(
  absolute: float = 1.0, relative: float = 1.05, decay: float = 0.98, warmup: int = 100
) -> optax.GradientTransformation:
  """AdaGC (Wang et al. 2025, arXiv:2502.11034, algorithm 1): each tensor by its own history.

  During `warmup`, the global norm is clipped to `absolute` and the level is the least clipped norm
  seen. Then a tensor's norm is clipped to `relative` times its level. Layers stacked for a scan are
  tensors of their own.
  """

  def norms(tree):
    def one(path, x):
      stacked = ".segments" in jax.tree_util.keystr(path)
      axes = tuple(range(int(stacked), x.ndim))
      return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))

    return jax.tree_util.tree_map_with_path(one, tree)

  def init(params):
    return AdaGCState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, norms(params)))

  def update(updates, state, params=None):
    del params
    warming = state.seen < warmup
    whole = jnp.minimum(1.0, absolute / norm(updates))
    sizes = norms(updates)

    def scale_of(size, level):
      return jnp.where(warming, whole, jnp.minimum(1.0, relative * level / (size + 1e-30)))

    def level_of(size, level):
      clipped = size * scale_of(size, level)
      least = jnp.where(state.seen == 0, clipped, jnp.minimum(level, clipped))
      return jnp.where(warming, least, decay * level + (1.0 - decay) * clipped)

    clipped = jax.tree.map(
      lambda g, *at: (g * scale_of(*at)).astype(g.dtype), updates, sizes, state.level
    )
    return clipped, AdaGCState(state.seen + 1, jax.tree.map(level_of, sizes, state.level))

  return optax.GradientTransformation(init, update)


class Rule(NamedTuple):
  """A rule on whole steps.

  Attributes:
    init: its memory at the start.
    rate: memory -> factor of the next learning rate.
    judge: (memory, loss, gradient norm) -> (memory, whether the step just made is kept).
  """

  init: Callable[[], Any]
  rate: Callable[[Any], jax.Array]
  judge: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


class Window(NamedTuple):
  """The newest samples, the newest last: float32 [2, length] of losses and gradient norms."""

  seen: jax.Array
  values: jax.Array

  @classmethod
  def new(cls, length: int) -> "Window":
    """Nothing seen yet."""
    return cls(jnp.zeros((), jnp.int32), jnp.zeros((2, length)))

  def add(self, loss: jax.Array, grad_norm: jax.Array) -> "Window":
    """Forget the oldest."""
    new = jnp.stack([loss, grad_norm])[:, None]
    return Window(self.seen + 1, jnp.concatenate([self.values[:, 1:], new], axis=1))


def skip_step(length: int = 128, sigmas: float = 6.0) -> Rule:
  """Leave a step out if loss or gradient norm is `sigmas` above the mean of the last `length`.

  As OLMo-core's SkipStepOptimizer does (so do levanter and MaxText): raw values, also of steps left
  out, also NaN; unbiased std; nothing is left out before half a window is seen.
  """

  def judge(memory: Window, loss: jax.Array, grad_norm: jax.Array):
    filled = jnp.arange(length) >= length - memory.seen
    count = jnp.minimum(memory.seen, length)
    mean = jnp.sum(memory.values, axis=1, where=filled) / jnp.maximum(count, 1)
    squares = jnp.sum(jnp.square(memory.values - mean[:, None]), axis=1, where=filled)
    std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
    normal = jnp.all(jnp.stack([loss, grad_norm]) - mean <= sigmas * std)  # False of NaN
    early = memory.seen + 1 < length // 2
    return memory.add(loss, grad_norm), early | normal

  return Rule(lambda: Window.new(length), lambda memory: jnp.float32(1.0), judge)


class RateMemory(NamedTuple):
  """Of `rate_rules`: what was seen, the factor, steps it is held for, steps until the next."""

  window: Window
  factor: jax.Array
  held: jax.Array
  cooldown: jax.Array


def rate_rules(least: float) -> Rule:
  """Rules of thumb on the learning rate (https://github.com/MatN23/AdaptiveTrainingSystem).

  The thresholds are those of that project's orchestrator; detectors act as its documentation says.
  A change multiplies the current rate and is held for 10 to 20 steps; then the schedule is back.

  | seen | factor | steps |
  |---|---|---|
  | gradient norm > 100, or > 10 times the mean of the last 50 | 0.1 | 20 |
  | mean of 10 losses > mean + 2 std of the 40 before, and by 1.0 or more | 0.5 | 20 |
  | the same, by 0.1 or more | 0.8 | 10 |
  | mean of 5 losses 0.3 above that of 5 losses ten steps earlier | 0.5 | 10 |
  | std of 5 losses < 0.01 and their mean > 0.5 | 1.5 | 15 |
  | mean of 5 losses 0.1 below that of 5 earlier, std < 0.05 | 1.2 | 10 |
  | mean of 5 gradient norms > 10 | 0.7 | 10 |

  The last four rest for 50 steps after one of the first three of them. Steps with a
  gradient that is not finite are left out.

  Args:
    least: the factor never falls below it.
  """

  def judge(memory: RateMemory, loss: jax.Array, grad_norm: jax.Array):
    window = memory.window.add(loss, grad_norm)
    losses, norms = window.values
    full = window.seen >= losses.shape[0]
    before, last, newest = losses[:-10], losses[-10:], losses[-5:]
    rise = jnp.mean(last) - jnp.mean(before)
    spike = rise > jnp.maximum(2.0 * jnp.std(before), 0.1)
    older = jnp.mean(losses[-15:-10])
    free = memory.cooldown == 0
    table = (  # condition, factor, steps
      ((grad_norm > 100.0) | (grad_norm > 10.0 * jnp.mean(norms[:-1])), 0.1, 20),
      (spike & (rise > 1.0), 0.5, 20),
      (spike, 0.8, 10),
      (free & (jnp.mean(newest) > older + 0.3), 0.5, 10),
      (free & (jnp.std(newest) < 0.01) & (jnp.mean(newest) > 0.5), 1.5, 15),
      (free & (jnp.mean(newest) < older - 0.1) & (jnp.std(newest) < 0.05), 1.2, 10),
      (free & (jnp.mean(norms[-5:]) > 10.0), 0.7, 10),
    )
    conditions = jnp.stack([full & seen for seen, _, _ in table])
    row, hit = jnp.argmax(conditions), jnp.any(conditions)
    factors = jnp.asarray([factor for _, factor, _ in table])
    steps = jnp.asarray([held for _, _, held in table])
    held = jnp.where(hit, steps[row], jnp.maximum(memory.held - 1, 0))
    factor = jnp.where(hit, jnp.maximum(memory.factor * factors[row], least), memory.factor)
    cooldown = jnp.where(hit & (row >= 3) & (row < 6), 50, jnp.maximum(memory.cooldown - 1, 0))
    new = RateMemory(window, jnp.where(held > 0, factor, 1.0), held, cooldown)
    return new, jnp.isfinite(grad_norm)

  zero = lambda: jnp.zeros((), jnp.int32)
  return Rule(
    lambda: RateMemory(Window.new(50), jnp.float32(1.0), zero(), zero()),
    lambda memory: memory.factor,
    judge,
  )
