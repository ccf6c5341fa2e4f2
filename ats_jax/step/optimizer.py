"""AdamW as an optax chain, or by the `adamw` op on the state of that chain."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.ops.adamw import Rates, adamw, clip_scale
from ats_jax.ops.registry import Kernels

# Parts of the paths of parameters that are vectors. Their shapes do not tell: layers are stacked.
VECTORS = (".scale", ".router.offset", ".depth.weight", ".depth.predict_out")


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


def build_optimizer(cfg: Config) -> optax.GradientTransformation:
  """Clip, Adam, decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

  The result is a descent direction of unit learning rate: parameters move by -lr times it.
  """
  o = cfg.optimizer
  chain: list[optax.GradientTransformation] = []
  if o.grad_clip:
    chain.append(clip_by_norm(o.grad_clip))
  dtypes = jnp.dtype(cfg.precision.mu_dtype), jnp.dtype(cfg.precision.nu_dtype)
  chain.append(scale_by_adam(o.b1, o.b2, o.eps, *dtypes))
  if o.weight_decay:
    chain.append(add_decayed_weights(o.weight_decay, embeddings=o.decay_embeddings))
  return optax.chain(*chain)


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
  """Scale gradients whose norm is above `max_norm` to it (Pascanu et al. 2013, algorithm 1).

  As `optax.clip_by_global_norm`, but in float32 whatever the gradients are: that one rounds the
  norm of bfloat16 gradients to bfloat16, and reads them once more than the step's own norm.
  `update` also takes their `grad_norm` from who knows it.
  """

  def update(updates, state, params=None, *, grad_norm: jax.Array | None = None, **_):
    del params
    known = norm(updates) if grad_norm is None else grad_norm
    # Without the seam it is by who else reads the norm whether XLA divides or takes an rsqrt.
    scale = jnp.minimum(1.0, max_norm / seam(known))
    return jax.tree.map(lambda g: g.astype(jnp.float32) * scale, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def add_decayed_weights(
  weight_decay: float, *, embeddings: bool
) -> optax.GradientTransformationExtraArgs:
  """As `optax.add_decayed_weights`; `update` also takes a `decay_scale` that multiplies the decay.

  Args:
    weight_decay: of the parameters in `decay_mask`.
    embeddings: see there.
  """

  def update(updates, state, params=None, *, decay_scale: jax.Array | float = 1.0, **_):
    decay = jnp.asarray(weight_decay, jnp.float32) * decay_scale
    one = lambda u, p, decays: u + decay.astype(p.dtype) * p if decays else u
    mask = decay_mask(params, embeddings=embeddings)
    return jax.tree.map(one, updates, params, mask), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


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


class Moved(NamedTuple):
  """What an update leaves behind.

  Attributes:
    params: new parameters.
    opt_state: new state.
    update_norm: float32, of what was added to the parameters.
  """

  params: Any
  opt_state: optax.OptState
  update_norm: jax.Array


def move(params: Any, directions: Any, lr: jax.Array) -> Any:
  """`params - lr * directions`, in float32, rounded once."""
  one = lambda p, d: (p.astype(jnp.float32) - lr * d).astype(p.dtype)
  return jax.tree.map(one, params, directions)


def fused_adamw(
  cfg: Config, params: Any, grads: Any, opt_state: optax.OptState, lr: jax.Array, kernels: Kernels
) -> Moved:
  """What the chain of `build_optimizer` does, in one pass over each parameter and on its state.

  Neither clipped gradients nor directions are ever in memory.
  """
  o = cfg.optimizer
  is_adam = lambda state: isinstance(state, AdamState)
  (adam,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
  steps = adam.steps + 1
  _, clip = clip_scale(grads, o.grad_clip)
  rates = Rates(clip, lr, 1.0 - o.b1**steps, 1.0 - o.b2**steps)
  decays = decay_mask(params, embeddings=o.decay_embeddings)
  leaves = zip(*map(jax.tree.leaves, (params, grads, adam.mu, adam.nu, decays)), strict=True)
  update = functools.partial(adamw, rates=rates, b1=o.b1, b2=o.b2, eps=o.eps, kernels=kernels)
  updated = [
    update(p, g, m, v, weight_decay=o.weight_decay * decay) for p, g, m, v, decay in leaves
  ]
  param, mu, nu, squares = zip(*updated, strict=True)
  like = jax.tree.structure(params).unflatten
  new = AdamState(steps, like(mu), like(nu))
  opt_state = jax.tree.map(lambda s: new if is_adam(s) else s, opt_state, is_leaf=is_adam)
  return Moved(like(param), opt_state, lr * jnp.sqrt(sum(squares)))


def seam(tree: Any) -> Any:
  """Where the guarded and the plain step part and meet again.

  XLA fuses across it differently in the two, and on the CPU rounds differently then (seen): there
  nothing is fused across. On a GPU that would write out what is never in memory otherwise.
  """
  return jax.lax.optimization_barrier(tree) if jax.default_backend() == "cpu" else tree


def norm(tree: Any) -> jax.Array:
  """The Euclidean norm of all leaves together; summed in float32, whatever their dtype."""
  return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def decay_mask(params: Any, *, embeddings: bool) -> Any:
  """Which parameters decay: matrices; the embedding table if asked; no norm scale or vector."""

  def decays(path, _):
    name = jax.tree_util.keystr(path)
    if any(vector in name for vector in VECTORS):
      return False
    return embeddings or not name.startswith(".embed")

  return jax.tree_util.tree_map_with_path(decays, params)
