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

WARM = 32  # samples before a tracker says anything
YOUNG = 6.0  # a tracker remembers a sixth of its samples, until that is what it may remember
FREE = 16  # samples that a new tracker takes as they are
GRADIENT_FLOOR = 0.46  # least std of the logarithm of a tensor's gradient
GRADIENT_SIGMAS = 15.0  # from which on one is held: of the least std, at 1,000 times the usual
RATE_MOST = 1.35  # of the highest rate so far; what is above is held
RATE_GROWTH, RATE_GROWTH_HELD = 1.05, 1.002  # how fast that one may rise, in a step
LOSS_FLOOR, LOSS_FLOOR_SHARE = 0.02, 0.0025  # least std of the loss: nats, and share of the mean
SURPRISE = 6.0  # sigmas from which on a loss surprises
REFILL = 0.005  # of a batch to be left out, given back by each step: 5 in 1,000
REACH = 6.0  # sigmas within which a sample is taken in: one kind in thirty becomes usual in time
CUSUM_SLACK, CUSUM_LEAST, CUSUM_MOST = 1.0, -4.0, 8.0  # sigmas (Page 1954, Biometrika 41)


class Tracker(NamedTuple):
  """Exponentially weighted mean and variance of a number, or of many at once; float32.

  Attributes:
    mean: of what was taken in.
    var: of the same.
    seen: samples taken in.
  """

  mean: jax.Array
  var: jax.Array
  seen: jax.Array

  @classmethod
  def new(cls, *shape: int) -> "Tracker":
    """Nothing seen yet of numbers of this shape."""
    return cls(*(jnp.zeros(shape, jnp.float32) for _ in cls._fields))

  def std(self, floor: jax.Array | float) -> jax.Array:
    """Never below `floor`: a quiet stretch must not turn the next wobble into an outlier."""
    return jnp.maximum(jnp.sqrt(self.var), floor)

  def z(self, x: jax.Array, floor: jax.Array | float) -> jax.Array:
    """How many sigmas `x` is above the mean; 0 before the tracker is warm; NaN of NaN."""
    return jnp.where(self.seen >= WARM, (x - self.mean) / self.std(floor), 0.0 * x)

  def add(
    self, x: jax.Array, floor: jax.Array | float, *, memory: float, reach: float
  ) -> "Tracker":
    """Takes in `x`, pulled to within `reach` sigmas of the mean; ignores what is not finite.

    Early on, what is tracked falls steeply; then remembering a share of the run instead of `memory`
    keeps the descent out of the variance.

    Args:
      x: like the mean.
      floor: see `std`.
      memory: weight of the past, e.g. 0.98 for the last fifty samples.
      reach: sigmas.
    """
    std = self.std(floor)
    pulled = jnp.clip(x, self.mean - reach * std, self.mean + reach * std)
    pulled = jnp.where(self.seen < FREE, x, pulled)
    weight = jnp.maximum(1.0 - memory, YOUNG / (self.seen + YOUNG))
    off = pulled - self.mean
    finite = jnp.isfinite(x)
    take = lambda new, old: jnp.where(finite, new, old)
    return Tracker(
      mean=take(self.mean + weight * off, self.mean),
      var=take((1.0 - weight) * (self.var + weight * jnp.square(off)), self.var),
      seen=self.seen + finite,
    )


class Reflex(NamedTuple):
  """State between steps. A tensor is one layer's array, see `step.tensors`.

  Attributes:
    grads: logarithms of the norms of the tensors' gradients, [tensors].
    rate: float32, the highest learning rate so far; it follows slowly what is held.
    loss: cross entropy per token.
    written: uint32 [tensors], checksums of the weights that the last step wrote.
    knows: bool, whether nobody else has written to them since.
    updates: int32, updates made: the optimizer's own count.
    bucket: float32, batches left out of late, about; none is once `control.bucket` are.
    cusum: float32, evidence that the loss stands higher than it did.
    broken: int32, steps in a row with a loss or gradient that is not finite.
    held: int32, steps in a row whose learning rate was held.
  """

  grads: Tracker
  rate: jax.Array
  loss: Tracker
  written: jax.Array
  knows: jax.Array
  updates: jax.Array
  bucket: jax.Array
  cusum: jax.Array
  broken: jax.Array
  held: jax.Array

  @classmethod
  def new(cls, tensors: int) -> "Reflex":
    """Nothing seen yet."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    written = jnp.zeros((tensors,), jnp.uint32)
    trackers = Tracker.new(tensors), zero, Tracker.new()
    return cls(*trackers, written, jnp.asarray(False), none, zero, zero, none, none)

  def allowing(self, rate: jax.Array) -> "Reflex":
    """A learning rate that somebody wants is not held for being higher than those before."""
    # What is not a number is none, and before the first step there is no limit.
    return self._replace(rate=jnp.where(self.rate > 0.0, jnp.fmax(self.rate, rate), self.rate))


class Control(NamedTuple):
  """What the supervisor sets between steps: scalars that a compiled step reads.

  Attributes:
    armed: bool; without it everything is measured and nothing is done.
    lr_scale: float32, multiplies the learning rate.
    bucket: float32, how many batches may be left out for their loss; 0 unless that was shown to
      help.
    decay_scale: float32, multiplies the weight decay.
    expert_dropout: float32, probability that an expert takes no part in a step.
  """

  armed: jax.Array
  lr_scale: jax.Array
  bucket: jax.Array
  decay_scale: jax.Array
  expert_dropout: jax.Array

  @classmethod
  def new(cls, *, armed: bool) -> "Control":
    """At the start: learning rate and decay as configured, all batches, all experts."""
    scalars = (jnp.asarray(x, jnp.float32) for x in (1.0, 0.0, 1.0, 0.0))
    return cls(jnp.asarray(armed), *scalars)


class Verdict(NamedTuple):
  """What the reflex thinks of a step before it is made.

  Attributes:
    finite: bool, loss and gradient are.
    accept: bool, whether the update is made.
    grad_scale: float32 [tensors], what the gradients are multiplied with.
    rate_scale: float32, what the learning rate is multiplied with.
    z_loss: sigmas of the loss.
    z_grad: [tensors], sigmas of the gradients' norms.
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
  """Is this step sound, how much of each gradient is used, and at what rate?

  Args:
    reflex: of the steps before.
    control: see there.
    loss: cross entropy per token of the batch, float32 scalar.
    squares: of the gradients before clipping, summed by tensor, float32 [tensors].
    rate: learning rate that schedule and supervisor want, float32.
  """
  finite = jnp.isfinite(loss) & jnp.all(jnp.isfinite(squares))
  z_loss = reflex.loss.z(loss, loss_floor(reflex))
  may_skip = reflex.bucket + 1.0 <= control.bucket
  accept = ~control.armed | (finite & ~((z_loss > SURPRISE) & may_skip))
  log_norms = _log_norm(squares)
  z_grad = reflex.grads.z(log_norms, GRADIENT_FLOOR)
  most = reflex.grads.mean + GRADIENT_SIGMAS * reflex.grads.std(GRADIENT_FLOOR)
  grad_scale = jnp.where(z_grad > GRADIENT_SIGMAS, jnp.minimum(1.0, jnp.exp(most - log_norms)), 1.0)
  limit = jnp.where(reflex.loss.seen < WARM, jnp.inf, RATE_MOST * reflex.rate)
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
  """The state for the next step, but for what it will be written. Takes what `judge` took."""
  streak = lambda old, happened: jnp.where(happened, old + 1, 0)
  is_held = verdict.rate_scale < 1.0
  left_out = verdict.finite & ~verdict.accept
  step = jnp.clip(verdict.z_loss, CUSUM_LEAST, CUSUM_MOST) - CUSUM_SLACK
  # A rate that is held does not become the highest by being asked for.
  growth = jnp.where(is_held, RATE_GROWTH_HELD, RATE_GROWTH)
  growth = jnp.where(reflex.loss.seen < WARM, jnp.inf, growth)
  most = jnp.where(reflex.rate > 0.0, growth * reflex.rate, jnp.inf)
  return reflex._replace(
    grads=reflex.grads.add(_log_norm(squares), GRADIENT_FLOOR, memory=0.98, reach=REACH),
    rate=jnp.clip(rate, reflex.rate, most),
    loss=reflex.loss.add(loss, loss_floor(reflex), memory=0.98, reach=REACH),
    updates=reflex.updates + verdict.accept,
    bucket=jnp.where(left_out, reflex.bucket + 1.0, jnp.maximum(reflex.bucket - REFILL, 0.0)),
    cusum=jnp.where(verdict.finite, jnp.maximum(reflex.cusum + step, 0.0), reflex.cusum),
    broken=streak(reflex.broken, ~verdict.finite),
    held=streak(reflex.held, is_held),
  )
