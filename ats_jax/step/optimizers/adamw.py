"""AdamW as an optax chain, or by the `adamw` op on the state of that chain."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import AdamW
from ats_jax.ops.adamw import UpdateScalars, adamw_update, clip_scale
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import (
  Checked,
  Moved,
  Optimizer,
  clipping,
  decay_mask,
  decoupled_decay,
)

# (1 - b2) times squares of smaller gradients is 0 in float32, up to a b2 of 0.9999.
UNDERFLOW = 3e-17


class AdamState(NamedTuple):
  """State of `scale_by_adam`.

  Attributes:
    steps: int32 scalar, updates so far.
    mu: first moments, a tree like the parameters.
    nu: second moments.
  """

  steps: jax.Array
  mu: Any
  nu: Any


def adamw(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Clip, Adam, decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

  Args:
    cfg: the resolved config.
    platform: where it runs.
    kernels: what runs; a kernel in the slot of the `adamw` op makes the update fused.
  """
  o = cfg.optimizer
  assert isinstance(o, AdamW)
  adam = scale_by_adam(o.b1, o.b2, o.eps, jnp.dtype(o.mu_dtype), jnp.dtype(o.nu_dtype))
  tx = optax.chain(*clipping(cfg, platform), adam, *decoupled_decay(cfg))
  has_kernel = kernels.of("adamw", "update") != "xla"
  fused = functools.partial(fused_adamw, cfg, kernels) if has_kernel else None
  return Optimizer(
    tx,
    platform,
    fused,
    recount,
    check=functools.partial(check_moments, b1=o.b1, b2=o.b2),
    refit=functools.partial(within_bound, b1=o.b1, b2=o.b2),
    squares=frozenset({"nu"}),
  )


def scale_by_adam(
  b1: float, b2: float, eps: float, mu_dtype: jnp.dtype, nu_dtype: jnp.dtype
) -> optax.GradientTransformation:
  """Adam's direction (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1), float32 arithmetic.

  As `optax.scale_by_adam`, but each moment has a dtype of its own: optax gives the second moment
  the parameters' dtype, and a bfloat16 average with b2 >= 0.99 stops moving. The bias corrections
  are in scalars, as at the end of the paper's section 2: with a single division an element, XLA
  makes the whole update of a parameter and its norm in one pass over memory.
  """

  def init(params):
    zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)
    return AdamState(jnp.zeros((), jnp.int32), zeros(mu_dtype), zeros(nu_dtype))

  def update(updates, state, params=None):
    del params
    steps = state.steps + 1
    average = lambda old, new, b: b * old.astype(jnp.float32) + (1.0 - b) * new
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    mu = jax.tree.map(lambda m, g: average(m, g, b1), state.mu, grads)
    nu = jax.tree.map(lambda v, g: average(v, jnp.square(g), b2), state.nu, grads)
    bias1, bias2 = 1.0 - b1**steps, 1.0 - b2**steps
    of_root = bias1 / jnp.sqrt(bias2)
    directions = jax.tree.map(lambda m, v: m / (of_root * jnp.sqrt(v) + bias1 * eps), mu, nu)
    cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)
    return directions, AdamState(steps, cast(mu, mu_dtype), cast(nu, nu_dtype))

  return optax.GradientTransformation(init, update)


def recount(opt_state: optax.OptState, updates: jax.Array) -> tuple[optax.OptState, jax.Array]:
  """See `Optimizer.recount`. A wrong count would turn Adam's bias corrections over."""
  is_adam = lambda state: isinstance(state, AdamState)
  (adam,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
  right = adam._replace(steps=updates)
  opt_state = jax.tree.map(lambda s: right if is_adam(s) else s, opt_state, is_leaf=is_adam)
  return opt_state, jnp.abs(adam.steps - updates).astype(jnp.float32)


def check_moments(
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
  *,
  b1: float,
  b2: float,
) -> Checked:
  """What holds of Adam's moments whatever the gradients were, element by element.

  A second moment is not negative, and a first moment is within `most_ratio` of its root: both are
  sums over the same gradients, which the inequality of Cauchy and Schwarz compares. See
  `Optimizer.check`.

  Of the moments before the update, which XLA has at hand in the pass that makes it: asked of those
  after it, the answers to bfloat16 moments are written out first (seen on an H200, jax 0.11.2).
  """
  is_adam = lambda state: isinstance(state, AdamState)
  adam_of = lambda tree: next(filter(is_adam, jax.tree.leaves(tree, is_leaf=is_adam)))
  # Behind a barrier: XLA would read zeros that something else has in memory, and tie both together.
  zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))

  def is_wrong(m: jax.Array, v: jax.Array) -> jax.Array:
    most = most_ratio(b1, b2, m.dtype, v.dtype)
    m, v = m.astype(jnp.float32), v.astype(jnp.float32)
    bound = most * most * v + UNDERFLOW * UNDERFLOW if math.isfinite(most) else jnp.inf
    return ~((v >= zero) & (v < jnp.inf) & (m * m <= bound))  # true of NaN too

  old, new = adam_of(before), adam_of(after)
  wrong = jax.tree.map(is_wrong, old.mu, old.nu)
  anew = lambda x, is_wrong: jnp.where(is_wrong & armed, zero.astype(x.dtype), x)
  marked = jax.tree.map(lambda d, is_wrong: jnp.where(is_wrong, jnp.nan, d), directions, wrong)
  directions, mu, nu = (jax.tree.map(anew, x, wrong) for x in (directions, new.mu, new.nu))
  mended = AdamState(new.steps, mu, nu)
  after = jax.tree.map(lambda s: mended if is_adam(s) else s, after, is_leaf=is_adam)
  return Checked(directions, after, marked)


def within_bound(opt_state: optax.OptState, b1: float, b2: float) -> optax.OptState:
  """Moments that were made with another `b2`, as this one could have left them.

  A second moment that would be too small for its first one is raised; all others stay as they are.
  """
  is_adam = lambda state: isinstance(state, AdamState)

  def raised(m: jax.Array, v: jax.Array) -> jax.Array:
    # Half of the slack of a bound is left, for the rounding to the moment's dtype.
    exact = most_ratio(b1, b2, m.dtype, v.dtype) * (1.0 - 0.5e-4)
    least = jnp.square(m.astype(jnp.float32) / exact)
    return jnp.maximum(v, (least * (1.0 + jnp.finfo(v.dtype).eps)).astype(v.dtype))

  fit = lambda s: s._replace(nu=jax.tree.map(raised, s.mu, s.nu)) if is_adam(s) else s
  return jax.tree.map(fit, opt_state, is_leaf=is_adam)


def most_ratio(b1: float, b2: float, mu_dtype: jnp.dtype, nu_dtype: jnp.dtype) -> float:
  """The largest |m| / sqrt(v) that gradients can lead to; infinite unless b1^2 < b2.

  m = (1-b1) sum b1^k g_k and v = (1-b2) sum b2^k g_k^2, so by Cauchy and Schwarz |m| <= (1-b1) /
  sqrt((1-b2) (1 - b1^2/b2)) sqrt(v). Rounding at each step adds a share: of the first moment at
  most its half unit over 1 - b1; of the second, whose growth may be lost below half a unit, that
  over 1 - b2.
  """
  if not b1 * b1 < b2 < 1.0:
    return math.inf
  half = lambda dtype: float(jnp.finfo(dtype).eps) / 2.0
  exact = (1.0 - b1) / math.sqrt((1.0 - b2) * (1.0 - b1 * b1 / b2))
  rounding = (1.0 + 2.0 * half(mu_dtype) / (1.0 - b1)) * math.sqrt(
    1.0 + 2.0 * half(nu_dtype) / (1.0 - b2)
  )
  return exact * rounding * (1.0 + 1e-4)


def fused_adamw(
  cfg: Config, kernels: Kernels, params: Any, grads: Any, opt_state: optax.OptState, lr: jax.Array
) -> Moved:
  """What the chain of `adamw` does, in one pass over each parameter and on its state.

  Neither clipped gradients nor directions are ever in memory.
  """
  o = cfg.optimizer
  assert isinstance(o, AdamW)
  is_adam = lambda state: isinstance(state, AdamState)
  (adam,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
  steps = adam.steps + 1
  rates = UpdateScalars(clip_scale(grads, o.grad_clip), lr, 1.0 - o.b1**steps, 1.0 - o.b2**steps)
  decays = decay_mask(params, embeddings=o.decay_embeddings)
  leaves = zip(*map(jax.tree.leaves, (params, grads, adam.mu, adam.nu, decays)), strict=True)
  update = functools.partial(
    adamw_update, rates=rates, b1=o.b1, b2=o.b2, eps=o.eps, kernels=kernels
  )
  updated = [
    update(p, g, m, v, weight_decay=o.weight_decay * decay) for p, g, m, v, decay in leaves
  ]
  param, mu, nu, squares = zip(*updated, strict=True)
  like = jax.tree.structure(params).unflatten
  new = AdamState(steps, like(mu), like(nu))
  opt_state = jax.tree.map(lambda s: new if is_adam(s) else s, opt_state, is_leaf=is_adam)
  return Moved(like(param), opt_state, lr * jnp.sqrt(sum(squares)))
