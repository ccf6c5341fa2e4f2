"""The reflex: what a training step does by itself, at once, when something is wrong with it.

It runs inside the jitted step, every step, without a word from the host. It may shrink a gradient,
shrink an update, or leave the update out. While nothing is flagged every factor is exactly 1 and
every choice is the new value, so parameters are bit for bit those of a step without it.

State is a few scalars. Statistics are of logarithms of norms, and of the loss; they are winsorised,
and what is not finite never enters them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WARM = 32  # samples before a tracker says anything
YOUNG = 6.0  # a tracker remembers a sixth of its samples, until that is what it may remember
FREE = 16  # samples that a new tracker takes as they are; outliers in a row after which it adapts
GRADIENT_FLOOR, UPDATE_FLOOR = 0.10, 0.05  # least std of logarithms of norms
LOSS_FLOOR, LOSS_FLOOR_SHARE = 0.02, 0.0025  # least std of the loss: nats, and share of the mean
SHRINK_GRADIENT, SHRINK_UPDATE = 6.0, 6.0  # sigmas from which on a norm is held
SKIP_LOSS, SKIP_GRADIENT, WITH_LOSS = 6.0, 8.0, 2.0  # sigmas from which on a step is left out
REFILL = 0.25  # of a skip, given back by each healthy step
CUSUM_SLACK, CUSUM_LEAST, CUSUM_MOST = 1.0, -4.0, 8.0  # sigmas (Page 1954, Biometrika 41)


class Tracker(NamedTuple):
  """Exponentially weighted mean and variance of a scalar; float32 scalars.

  Attributes:
    mean: of what was taken in.
    var: of the same.
    seen: samples taken in.
    outliers: samples in a row that were not healthy, and trained on nevertheless.
  """

  mean: jax.Array
  var: jax.Array
  seen: jax.Array
  outliers: jax.Array

  @classmethod
  def new(cls) -> "Tracker":
    """Nothing seen yet."""
    return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))

  def std(self, floor: jax.Array | float) -> jax.Array:
    """Never below `floor`: a quiet stretch must not turn the next wobble into an outlier."""
    return jnp.maximum(jnp.sqrt(self.var), floor)

  def z(self, x: jax.Array, floor: jax.Array | float) -> jax.Array:
    """How many sigmas `x` is above the mean; 0 before the tracker is warm; NaN of NaN."""
    return jnp.where(self.seen >= WARM, (x - self.mean) / self.std(floor), 0.0 * x)

  def add(
    self,
    x: jax.Array,
    healthy: jax.Array,
    accepted: jax.Array,
    floor: jax.Array | float,
    *,
    memory: float,
    reach: float,
  ) -> "Tracker":
    """Takes in `x`, pulled to within `reach` sigmas of the mean.

    Early on, what is tracked falls steeply; then remembering a share of the run instead of `memory`
    keeps the descent out of the variance.

    Args:
      x: scalar; what is not finite is ignored.
      healthy: bool; others are kept out, unless `FREE` in a row were trained on: then the level has
        changed.
      accepted: bool, whether the step was trained on.
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
    taken = finite & (healthy | (accepted & (self.outliers >= FREE)))
    take = lambda new, old: jnp.where(taken, new, old)
    return Tracker(
      mean=take(self.mean + weight * off, self.mean),
      var=take((1.0 - weight) * (self.var + weight * jnp.square(off)), self.var),
      seen=self.seen + taken,
      outliers=jnp.where(finite & healthy, 0.0, self.outliers + (finite & accepted)),
    )


class Reflex(NamedTuple):
  """State between steps.

  Attributes:
    grad: logarithm of the gradient's norm.
    update: logarithm of the norm of the optimizer's direction, which the learning rate multiplies.
    loss: cross entropy per token.
    bucket: float32, skips in a row, about: none is left out for its loss once `control.bucket` are.
    cusum: float32, evidence that the loss stands higher than it did.
    skipped: int32, updates left out so far.
    shrunk: int32, updates shrunk so far.
    broken: int32, steps in a row with a loss or gradient that is not finite.
    held: int32, updates in a row that were shrunk.
  """

  grad: Tracker
  update: Tracker
  loss: Tracker
  bucket: jax.Array
  cusum: jax.Array
  skipped: jax.Array
  shrunk: jax.Array
  broken: jax.Array
  held: jax.Array

  @classmethod
  def new(cls) -> "Reflex":
    """Nothing seen yet."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    trackers = (Tracker.new(), Tracker.new(), Tracker.new())
    return cls(*trackers, zero, zero, none, none, none, none)


class Control(NamedTuple):
  """What the supervisor sets between steps: scalars that a compiled step reads.

  Attributes:
    armed: bool; without it everything is measured and nothing is done.
    lr_scale: float32, multiplies the learning rate.
    bucket: float32, how many steps in a row may be left out for their loss.
    decay_scale: float32, multiplies the weight decay.
    expert_dropout: float32, probability that an expert takes no part in a step.
  """

  armed: jax.Array
  lr_scale: jax.Array
  bucket: jax.Array
  decay_scale: jax.Array
  expert_dropout: jax.Array

  @classmethod
  def new(cls, *, armed: bool, bucket: float) -> "Control":
    """At the start: learning rate and decay as configured, all experts."""
    scalars = (jnp.asarray(x, jnp.float32) for x in (1.0, bucket, 1.0, 0.0))
    return cls(jnp.asarray(armed), *scalars)


class Verdict(NamedTuple):
  """What the reflex thinks of a loss and its gradient.

  Attributes:
    finite: bool, both are.
    suspect: bool, the loss is far too high: the batch, or the state, is not what it was.
    accept: bool, whether the update is made.
    grad_scale: float32, what the gradient is multiplied with.
    z_grad: sigmas of its norm.
    z_loss: sigmas of the loss.
  """

  finite: jax.Array
  suspect: jax.Array
  accept: jax.Array
  grad_scale: jax.Array
  z_grad: jax.Array
  z_loss: jax.Array


def judge(reflex: Reflex, control: Control, loss: jax.Array, grad_norm: jax.Array) -> Verdict:
  """Before the optimizer: is this step sound, and how much of its gradient?

  Args:
    reflex: of the steps before.
    control: see there.
    loss: cross entropy per token of the batch, float32 scalar.
    grad_norm: before clipping, float32 scalar.
  """
  log_norm = jnp.log(grad_norm + 1e-30)
  finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  z_grad = reflex.grad.z(log_norm, GRADIENT_FLOOR)
  z_loss = reflex.loss.z(loss, loss_floor(reflex))
  suspect = (z_loss > SKIP_LOSS) | ((z_grad > SKIP_GRADIENT) & (z_loss > WITH_LOSS))
  may_skip = reflex.bucket < control.bucket
  accept = ~control.armed | (finite & ~(suspect & may_skip))
  # The further out, the closer to the mean it is pulled (ZClip, arXiv:2504.02507, in logarithms).
  std = reflex.grad.std(GRADIENT_FLOOR)
  target = reflex.grad.mean + SHRINK_GRADIENT * std * jnp.minimum(1.0, SHRINK_GRADIENT / z_grad)
  shrink = control.armed & (z_grad > SHRINK_GRADIENT)
  grad_scale = jnp.where(shrink, jnp.minimum(1.0, jnp.exp(target - log_norm)), 1.0)
  return Verdict(finite, suspect, accept, grad_scale, z_grad, z_loss)


def loss_floor(reflex: Reflex) -> jax.Array:
  """The least std of the loss, in nats."""
  return jnp.maximum(LOSS_FLOOR, LOSS_FLOOR_SHARE * reflex.loss.mean)


def govern(reflex: Reflex, control: Control, size: jax.Array) -> tuple[jax.Array, jax.Array]:
  """After the optimizer: how much of the update is applied.

  Args:
    reflex: of the steps before.
    control: see there.
    size: norm of the update over the learning rate that schedule and supervisor want.

  Returns:
    The factor of the update, float32, and the sigmas of `size`.
  """
  log_size = jnp.log(size + 1e-30)
  z = reflex.update.z(log_size, UPDATE_FLOOR)
  most = reflex.update.mean + SHRINK_UPDATE * reflex.update.std(UPDATE_FLOOR)
  shrink = control.armed & (z > SHRINK_UPDATE)
  return jnp.where(shrink, jnp.minimum(1.0, jnp.exp(most - log_size)), 1.0), z


def advance(
  reflex: Reflex,
  verdict: Verdict,
  loss: jax.Array,
  grad_norm: jax.Array,
  size: jax.Array,
  update_scale: jax.Array,
) -> Reflex:
  """The state for the next step. Takes what `judge` and `govern` took and gave."""
  healthy = verdict.finite & ~verdict.suspect
  count = lambda old, happened: old + happened.astype(jnp.int32)
  streak = lambda old, happened: jnp.where(happened, old + 1, 0)
  shrunk = (verdict.grad_scale < 1.0) | (update_scale < 1.0)
  skipped_for_loss = verdict.finite & ~verdict.accept
  bucket = jnp.where(
    skipped_for_loss, reflex.bucket + 1.0, jnp.maximum(reflex.bucket - REFILL * healthy, 0.0)
  )
  step = jnp.clip(verdict.z_loss, CUSUM_LEAST, CUSUM_MOST) - CUSUM_SLACK
  log_grad, log_size = jnp.log(grad_norm + 1e-30), jnp.log(size + 1e-30)
  how = (healthy, verdict.accept)
  return Reflex(
    grad=reflex.grad.add(log_grad, *how, GRADIENT_FLOOR, memory=0.98, reach=3.0),
    # Slowly: at most one sigma a step, so that a rate that is wrong does not become the norm.
    update=reflex.update.add(log_size, *how, UPDATE_FLOOR, memory=0.95, reach=1.0),
    loss=reflex.loss.add(loss, *how, loss_floor(reflex), memory=0.98, reach=3.0),
    bucket=bucket,
    cusum=jnp.where(verdict.finite, jnp.maximum(reflex.cusum + step, 0.0), reflex.cusum),
    skipped=count(reflex.skipped, ~verdict.accept),
    shrunk=count(reflex.shrunk, verdict.accept & shrunk),
    broken=streak(reflex.broken, ~verdict.finite),
    held=streak(reflex.held, update_scale < 1.0),
  )
