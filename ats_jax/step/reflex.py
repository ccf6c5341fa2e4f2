"""The reflex: the guard inside the training step, which acts at once.

It runs in the jitted step, every step, without the host. It leaves out updates whose loss or
gradient is not finite. It trains on everything finite, however surprising, but bounds the influence
of each tensor's gradient and how fast the learning rate may rise. While nothing is flagged every
factor is exactly 1 and every choice is the new value, so parameters are bit for bit those of a step
without it.

Surprising samples enter the statistics too, pulled to within a few sigmas. So a kind of batch that
comes again and again becomes usual. Samples that are not finite never enter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Trackers.
WARMUP_SAMPLES = 32  # samples before a tracker judges
EARLY_MEMORY = 6.0  # early on, a tracker's memory is a sixth of its samples
UNCLIPPED_SAMPLES = 16  # samples that a new tracker takes in without clipping
CLIP_SIGMAS = 6.0  # samples are clipped to this; one kind in thirty becomes usual in time
# Gradients, by tensor.
GRADIENT_FLOOR = 0.46  # least std of the logarithm of a gradient's norm
GRADIENT_SIGMAS = 15.0  # larger gradients are scaled down; at the least std, 1,000 times the usual
# The learning rate.
MAX_RATE_RATIO = 1.35  # of the highest rate so far; higher rates are held to this
RATE_GROWTH = 1.05  # how fast the highest rate may rise in a step
HELD_RATE_GROWTH = 1.002  # how fast it rises in a step whose rate is held
# The loss.
LOSS_FLOOR = 0.02  # least std of the loss, in nats
LOSS_FLOOR_SHARE = 0.0025  # least std of the loss, as a share of its mean


class Tracker(NamedTuple):
  """Exponentially weighted mean and variance of one or several numbers; float32.

  Attributes:
    mean: the mean of the samples.
    var: the variance of the samples.
    seen: the number of samples.
  """

  mean: jax.Array
  var: jax.Array
  seen: jax.Array

  @classmethod
  def new(cls, *shape: int) -> "Tracker":
    """A tracker without samples, of numbers of this shape."""
    return cls(*(jnp.zeros(shape, jnp.float32) for _ in cls._fields))

  def std(self, floor: jax.Array | float) -> jax.Array:
    """The standard deviation, at least `floor`, so that a quiet stretch makes no false outliers."""
    return jnp.maximum(jnp.sqrt(self.var), floor)

  def z(self, x: jax.Array, floor: jax.Array | float) -> jax.Array:
    """How many sigmas `x` is above the mean; 0 before the tracker is warm; NaN of NaN."""
    return jnp.where(self.seen >= WARMUP_SAMPLES, (x - self.mean) / self.std(floor), 0.0 * x)

  def add(
    self, x: jax.Array, floor: jax.Array | float, *, memory: float, reach: float
  ) -> "Tracker":
    """Add a sample, clipped to within `reach` sigmas of the mean; ignore it if it is not finite.

    Early on, what is tracked falls steeply; then remembering a share of the run instead of `memory`
    keeps the descent out of the variance.

    Args:
      x: the sample, shaped like the mean.
      floor: the least standard deviation.
      memory: weight of the past, e.g. 0.98 for the last fifty samples.
      reach: the clipping distance in sigmas.
    """
    std = self.std(floor)
    pulled = jnp.clip(x, self.mean - reach * std, self.mean + reach * std)
    pulled = jnp.where(self.seen < UNCLIPPED_SAMPLES, x, pulled)
    weight = jnp.maximum(1.0 - memory, EARLY_MEMORY / (self.seen + EARLY_MEMORY))
    off = pulled - self.mean
    finite = jnp.isfinite(x)
    take = lambda new, old: jnp.where(finite, new, old)
    return Tracker(
      mean=take(self.mean + weight * off, self.mean),
      var=take((1.0 - weight) * (self.var + weight * jnp.square(off)), self.var),
      seen=self.seen + finite,
    )


class Reflex(NamedTuple):
  """The state of the reflex between steps. A tensor is one layer's array (`step.tensors`).

  Attributes:
    grads: a tracker of the logarithms of gradient norms, [tensors].
    rate: float32, the highest learning rate so far; it rises slowly while a rate is held.
    loss: a tracker of the cross-entropy per token.
    written: uint32 [tensors], checksums of the weights that the last step wrote.
    knows: bool, whether `written` is valid: no other code has written weights since.
    updates: int32, the number of updates, which the optimizer counts too.
    broken: int32, consecutive steps with a loss or gradient that is not finite.
    held: int32, consecutive steps whose learning rate was held.
  """

  grads: Tracker
  rate: jax.Array
  loss: Tracker
  written: jax.Array
  knows: jax.Array
  updates: jax.Array
  broken: jax.Array
  held: jax.Array

  @classmethod
  def new(cls, tensors: int) -> "Reflex":
    """A reflex without samples, for a number of tensors."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    written = jnp.zeros((tensors,), jnp.uint32)
    trackers = Tracker.new(tensors), zero, Tracker.new()
    return cls(*trackers, written, jnp.asarray(False), none, none, none)

  def allow_rate(self, rate: jax.Array) -> "Reflex":
    """Accept a requested learning rate: it will not be held for being higher than earlier ones."""
    # What is not a number is none, and before the first step there is no limit.
    return self._replace(rate=jnp.where(self.rate > 0.0, jnp.fmax(self.rate, rate), self.rate))


class Control(NamedTuple):
  """Scalars that the supervisor sets between steps and a compiled step reads.

  Attributes:
    armed: bool; False = the reflex measures and does not act.
    lr_scale: float32, multiplies the learning rate.
    decay_scale: float32, multiplies the weight decay.
    expert_dropout: float32, probability that an expert takes no part in a step.
    balance_scale: float32, multiplies `moe.bias_rate`.
  """

  armed: jax.Array
  lr_scale: jax.Array
  decay_scale: jax.Array
  expert_dropout: jax.Array
  balance_scale: jax.Array

  @classmethod
  def new(cls, *, armed: bool) -> "Control":
    """At the start: learning rate and decay as configured, all experts."""
    scalars = (jnp.asarray(x, jnp.float32) for x in (1.0, 1.0, 0.0, 1.0))
    return cls(jnp.asarray(armed), *scalars)


class Verdict(NamedTuple):
  """The verdict of the reflex on a step before its update.

  Attributes:
    finite: bool, whether loss and gradients are finite.
    accept: bool, whether the update is made.
    grad_scale: float32 [tensors], factors of the gradients.
    rate_scale: float32, factor of the learning rate.
    z_loss: how many sigmas the loss is above its mean.
    z_grad: [tensors], how many sigmas each gradient's norm is above its mean.
  """

  finite: jax.Array
  accept: jax.Array
  grad_scale: jax.Array
  rate_scale: jax.Array
  z_loss: jax.Array
  z_grad: jax.Array


def judge(
  reflex: Reflex, control: Control, loss: jax.Array, squares: jax.Array, rate: jax.Array
) -> Verdict:
  """Decide whether the update is made, and how gradients and the learning rate are scaled.

  Args:
    reflex: the state after the step before.
    control: the settings of the supervisor.
    loss: cross-entropy per token of the batch, float32 scalar.
    squares: sums of squares of the gradients before clipping, float32 [tensors].
    rate: the learning rate by schedule and supervisor, float32.
  """
  finite = jnp.isfinite(loss) & jnp.all(jnp.isfinite(squares))
  z_loss = reflex.loss.z(loss, loss_floor(reflex))
  accept = ~control.armed | finite
  log_norms = _log_norm(squares)
  z_grad = reflex.grads.z(log_norms, GRADIENT_FLOOR)
  most = reflex.grads.mean + GRADIENT_SIGMAS * reflex.grads.std(GRADIENT_FLOOR)
  grad_scale = jnp.where(z_grad > GRADIENT_SIGMAS, jnp.minimum(1.0, jnp.exp(most - log_norms)), 1.0)
  limit = jnp.where(reflex.loss.seen < WARMUP_SAMPLES, jnp.inf, MAX_RATE_RATIO * reflex.rate)
  rate_scale = jnp.where(rate > limit, limit / rate, 1.0)
  used = lambda scale: jnp.where(control.armed, scale, 1.0)
  return Verdict(finite, accept, used(grad_scale), used(rate_scale), z_loss, z_grad)


def loss_floor(reflex: Reflex) -> jax.Array:
  """The least std of the loss, in nats."""
  return jnp.maximum(LOSS_FLOOR, LOSS_FLOOR_SHARE * reflex.loss.mean)


def _log_norm(squares: jax.Array) -> jax.Array:
  return 0.5 * jnp.log(squares + 1e-30)


def advance(
  reflex: Reflex,
  verdict: Verdict,
  loss: jax.Array,
  squares: jax.Array,
  rate: jax.Array,
) -> Reflex:
  """Update the trackers and counters with a step; arguments as in `judge`. `written` stays."""
  streak = lambda old, happened: jnp.where(happened, old + 1, 0)
  is_held = verdict.rate_scale < 1.0
  # A rate that is held does not become the highest by being asked for.
  growth = jnp.where(is_held, HELD_RATE_GROWTH, RATE_GROWTH)
  growth = jnp.where(reflex.loss.seen < WARMUP_SAMPLES, jnp.inf, growth)
  most = jnp.where(reflex.rate > 0.0, growth * reflex.rate, jnp.inf)
  return reflex._replace(
    grads=reflex.grads.add(_log_norm(squares), GRADIENT_FLOOR, memory=0.98, reach=CLIP_SIGMAS),
    rate=jnp.clip(rate, reflex.rate, most),
    loss=reflex.loss.add(loss, loss_floor(reflex), memory=0.98, reach=CLIP_SIGMAS),
    updates=reflex.updates + verdict.accept,
    broken=streak(reflex.broken, ~verdict.finite),
    held=streak(reflex.held, is_held),
  )
