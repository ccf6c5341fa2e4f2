"""AdamW as an optax chain, or by the `adamw` op on the state of that chain."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import AdamW, WithAdam
from ats_jax.ops.adamw import AdamWResult, UpdateScalars, adamw_update, clip_scale
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import (
  Checked,
  Moved,
  Optimizer,
  PerParam,
  by_role,
  check_elements,
  clipping,
  decay_rates,
  decoupled_decay,
  each,
  recount,
  relative_rates,
  state_of,
  with_state,
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
  b1, b2 = betas_of(o)
  adam = scale_by_adam(b1, b2, o.eps, jnp.dtype(o.mu_dtype), jnp.dtype(o.nu_dtype))
  tx = optax.chain(*clipping(cfg, platform), adam, *decoupled_decay(cfg))
  has_kernel = kernels.of("adamw", "update") != "xla"
  fused = functools.partial(fused_adamw, cfg, kernels) if has_kernel else None
  return Optimizer(
    tx,
    platform,
    fused,
    recount,
    check=functools.partial(check_moments, b1=b1, b2=b2),
    refit=functools.partial(within_bound, b1=b1, b2=b2),
  )


def betas_of(settings: WithAdam) -> tuple[PerParam, PerParam]:
  """b1 and b2 of parameters."""
  of = settings
  return by_role(of.b1_by_role, of.b1), by_role(of.b2_by_role, of.b2)


def scale_by_adam(
  b1: PerParam, b2: PerParam, eps: float, mu_dtype: jnp.dtype, nu_dtype: jnp.dtype
) -> optax.GradientTransformation:
  """Adam's direction (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1), float32 arithmetic.

  As `optax.scale_by_adam`, but each moment has a dtype of its own: optax gives the second moment
  the parameters' dtype, and a bfloat16 average with b2 >= 0.99 stops moving. The bias corrections
  are in scalars, as at the end of the paper's section 2: with a single division an element, XLA
  makes the whole update of a parameter and its norm in one pass over memory.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    mu_dtype: of the first moment.
    nu_dtype: of the second moment.
  """

  def init(params):
    zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)
    return AdamState(jnp.zeros((), jnp.int32), zeros(mu_dtype), zeros(nu_dtype))

  def update(updates, state, params=None):
    del params
    steps = state.steps + 1
    average = lambda old, new, b: b * old.astype(jnp.float32) + (1.0 - b) * new
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    b1s, b2s = each(b1, updates), each(b2, updates)
    mu = jax.tree.map(average, state.mu, grads, b1s)
    nu = jax.tree.map(lambda v, g, b: average(v, jnp.square(g), b), state.nu, grads, b2s)

    direction = functools.partial(adam_direction, steps, eps)
    directions = jax.tree.map(direction, mu, nu, b1s, b2s)
    cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)
    return directions, AdamState(steps, cast(mu, mu_dtype), cast(nu, nu_dtype))

  return optax.GradientTransformation(init, update)


def adam_direction(
  steps: jax.Array, eps: float, m: jax.Array, v: jax.Array, b1: float, b2: float
) -> jax.Array:
  """The direction of update `steps` (1-based) by the moments after it."""
  bias1, bias2 = 1.0 - b1**steps, 1.0 - b2**steps
  return m / (bias1 / jnp.sqrt(bias2) * jnp.sqrt(v) + bias1 * eps)


def check_moments(
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
  *,
  b1: PerParam,
  b2: PerParam,
) -> Checked:
  """What holds of Adam's moments whatever the gradients were, element by element.

  A second moment is not negative, and a first moment is within `most_ratio` of its root: both are
  sums over the same gradients, which the inequality of Cauchy and Schwarz compares. See
  `Optimizer.check`.
  """

  def is_wrong(state: AdamState, zero: jax.Array) -> Any:
    def of_param(m: jax.Array, v: jax.Array, b1: float, b2: float) -> jax.Array:
      most = most_ratio(b1, b2, m.dtype, v.dtype)
      m, v = m.astype(jnp.float32), v.astype(jnp.float32)
      bound = most * most * v + UNDERFLOW * UNDERFLOW
      return ~((v >= zero) & (v < jnp.inf) & (m * m <= bound))  # true of NaN too

    return jax.tree.map(of_param, state.mu, state.nu, each(b1, state.mu), each(b2, state.mu))

  return check_elements(AdamState, ("mu", "nu"), is_wrong, before, directions, after, armed)


def within_bound(opt_state: optax.OptState, b1: PerParam, b2: PerParam) -> optax.OptState:
  """Moments that were made with another `b2`, as this one could have left them.

  A second moment that would be too small for its first one is raised; all others stay as they are.
  """
  old = state_of(AdamState, opt_state)
  nu = jax.tree.map(raised, old.mu, old.nu, each(b1, old.mu), each(b2, old.mu))
  return with_state(old._replace(nu=nu), opt_state)


def raised(m: jax.Array, v: jax.Array, b1: float, b2: float) -> jax.Array:
  """Second moments that are not too small for the first ones: `v`, or what the bound asks for."""
  # Half of the slack of a bound is left, for the rounding to the moment's dtype.
  exact = most_ratio(b1, b2, m.dtype, v.dtype) * (1.0 - 0.5e-4)
  least = jnp.square(m.astype(jnp.float32) / exact)
  return jnp.maximum(v, (least * (1.0 + jnp.finfo(v.dtype).eps)).astype(v.dtype))


def most_ratio(b1: float, b2: float, mu_dtype: jnp.dtype, nu_dtype: jnp.dtype) -> float:
  """The largest |m| / sqrt(v) that gradients can lead to, of betas that settings may have.

  m = (1-b1) sum b1^k g_k and v = (1-b2) sum b2^k g_k^2, so by Cauchy and Schwarz |m| <= (1-b1) /
  sqrt((1-b2) (1 - b1^2/b2)) sqrt(v). Rounding at each step adds a share: of the first moment at
  most its half unit over 1 - b1; of the second, whose growth may be lost below half a unit, that
  over 1 - b2.
  """
  half = lambda dtype: float(jnp.finfo(dtype).eps) / 2.0
  memory = b1 * b1 / b2 if b1 else 0.0  # below 1: WithAdam.check
  exact = (1.0 - b1) / math.sqrt((1.0 - b2) * (1.0 - memory))
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
  adam = state_of(AdamState, opt_state)
  steps, clip = adam.steps + 1, clip_scale(grads, o.grad_clip)

  def of_param(p, g, m, v, b1, b2, decay, rate) -> AdamWResult:
    scalars = UpdateScalars(clip, rate * lr, 1.0 - b1**steps, 1.0 - b2**steps)
    new = adamw_update(
      p, g, m, v, scalars, b1=b1, b2=b2, eps=o.eps, weight_decay=decay, kernels=kernels
    )
    return new._replace(squares=rate * rate * new.squares)

  b1s, b2s = (each(b, params) for b in betas_of(o))
  decays, relative = decay_rates(cfg, params), relative_rates(cfg, params)
  of_each = map(jax.tree.leaves, (params, grads, adam.mu, adam.nu, b1s, b2s, decays, relative))
  updated = [of_param(*leaves) for leaves in zip(*of_each, strict=True)]
  param, mu, nu, squares = zip(*updated, strict=True)
  like = jax.tree.structure(params).unflatten
  opt_state = with_state(AdamState(steps, like(mu), like(nu)), opt_state)
  return Moved(like(param), opt_state, lr * jnp.sqrt(sum(squares)))
