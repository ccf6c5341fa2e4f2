"""AdamW whose moments of matrices are 8-bit codes with a scale for each block.

Blocks lie along the last dimension of a matrix of one layer or expert. The first moment is coded by
the signed dynamic map, and of the second one the root by the unsigned map (`ops.dynamic_map`). An
affine map of the second moment itself would round small ones to 0, and updates would be too long.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import AdamW8bit
from ats_jax.model.param import Param, Role, per_param
from ats_jax.ops import dynamic_map
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding import blocks
from ats_jax.step.optimizers.adamw import (
  UNDERFLOW,
  AdamState,
  adam_direction,
  betas_of,
  most_ratio,
  raised,
)
from ats_jax.step.optimizers.base import (
  Checked,
  Optimizer,
  check_elements,
  clipping,
  decoupled_decay,
  each,
  recount,
  state_of,
  with_state,
)

CODED = frozenset({Role.MATRIX, Role.EXPERT, Role.ADAPTER})
TINY = 1e-30  # blocks whose largest number is below are blocks of zeros
# Two experts that become one have sums of moments, which are coded apart from each other.
MERGED = 2.0 * math.sqrt(2.0) / dynamic_map.LEAST_SHARE
FLOAT32 = jnp.dtype("float32")


class Adam8bitState(NamedTuple):
  """State of `scale_by_adam8bit`.

  Attributes:
    steps: int32 scalar, updates so far.
    mu: first moments, a tree like the parameters; of matrices the codes, uint8.
    nu: second moments, likewise; of matrices codes of their roots.
    mu_scale: what a value of 1 stands for, float32 [..., blocks], in a tree like the parameters;
      `optax.MaskedNode` for those with moments in float32.
    nu_scale: likewise.
  """

  steps: jax.Array
  mu: Any
  nu: Any
  mu_scale: Any
  nu_scale: Any


@dataclasses.dataclass(frozen=True)
class FirstMoment:
  """How first moments are coded. See `step.optimizers.base.Codec`."""

  block: int
  field: str = "mu"
  scales: str = "mu_scale"

  def decode(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes and scales to float32."""
    return dynamic_map.decode_signed(codes) * blocks.spread(scale, codes, self.block)

  def encode(self, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 to codes and scales."""
    # The map has no -1: a scale by which its least value is the least number loses nothing.
    size = jnp.where(m < 0.0, m / dynamic_map.LEAST, m)
    scale = _without_tiny(blocks.largest(size, self.block))
    return dynamic_map.encode_signed(m * _inverse(scale, m, self.block)), scale


@dataclasses.dataclass(frozen=True)
class SecondMoment:
  """How second moments are coded. See `step.optimizers.base.Codec`."""

  block: int
  field: str = "nu"
  scales: str = "nu_scale"

  def decode(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes and scales to float32."""
    return jnp.square(dynamic_map.decode_unsigned(codes) * blocks.spread(scale, codes, self.block))

  def encode(
    self, v: jax.Array, least: jax.Array | float = 0.0, least_scale: jax.Array | float = 0.0
  ) -> tuple[jax.Array, jax.Array]:
    """float32 to codes and scales.

    Args:
      v: second moments.
      least: which no root that is coded is less than.
      least_scale: the largest of `least` in each block.
    """
    root = jnp.sqrt(v)
    scale = _without_tiny(jnp.maximum(blocks.largest(root, self.block), least_scale))
    root = jnp.maximum(root, least)
    return dynamic_map.encode_unsigned(root * _inverse(scale, v, self.block)), scale


def _without_tiny(scale: jax.Array) -> jax.Array:
  return jnp.where(scale < TINY, 0.0, scale)  # NaN stays


def _inverse(scale: jax.Array, like: jax.Array, block: int) -> jax.Array:
  return blocks.spread(jnp.where(scale == 0.0, 0.0, 1.0 / scale), like, block)


class Moments(NamedTuple):
  """What is kept of a parameter, by field of the state."""

  mu: Any
  nu: Any
  mu_scale: Any
  nu_scale: Any


def decoded(kept: Moments, block: int) -> tuple[jax.Array, jax.Array]:
  """Both moments of a parameter in float32."""
  if isinstance(kept.mu_scale, optax.MaskedNode):
    return kept.mu, kept.nu
  m = FirstMoment(block).decode(kept.mu, kept.mu_scale)
  return m, SecondMoment(block).decode(kept.nu, kept.nu_scale)


def coded(m: jax.Array, v: jax.Array, most: float, block: int) -> Moments:
  """Code both moments of a matrix, so that `|m| <= most / LEAST_SHARE * sqrt(v)` whatever they are.

  What is rounded differently may be far from what gradients lead to: a second moment of 0 beside a
  first one that is not would make updates of any length, now or when the gradient is small. So the
  root that is coded is at least |m| / most of the m that was coded; if the moments are those of
  gradients and m was not rounded up, that changes nothing.

  Args:
    m: first moments.
    v: second moments.
    most: the largest |m| / sqrt(v) that gradients can lead to.
    block: numbers along the last dimension that have one scale.
  """
  first = FirstMoment(block)
  mu, mu_scale = first.encode(m)
  least = jnp.abs(first.decode(mu, mu_scale)) / most
  nu, nu_scale = SecondMoment(block).encode(v, least, mu_scale / most)
  return Moments(mu, nu, mu_scale, nu_scale)


def adamw8bit(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Clip, Adam with moments in 8 bits, decoupled weight decay."""
  del kernels
  o = cfg.optimizer
  assert isinstance(o, AdamW8bit)
  return Optimizer(
    optax.chain(*clipping(cfg, platform), scale_by_adam8bit(o), *decoupled_decay(cfg)),
    platform,
    recount=recount,
    check=functools.partial(_check, o),
    refit=functools.partial(_refit, o),
    codecs=(FirstMoment(o.block_size), SecondMoment(o.block_size)),
  )


def is_coded(settings: AdamW8bit, param: Param) -> bool:
  """Whether the moments of a parameter are coded: those of large matrices within layers."""
  matrix = param.shape[param.num_stacked :]
  return param.role in CODED and len(matrix) > 1 and math.prod(matrix) >= settings.min_size


def scale_by_adam8bit(settings: AdamW8bit) -> optax.GradientTransformation:
  """Adam's direction by moments that are coded between updates; float32 arithmetic.

  The direction is that of the moments before they are coded, as in bitsandbytes.
  """
  block = settings.block_size

  def init(params):
    def new(param: Param) -> Moments:
      x: Any = param[...]
      in_codes = is_coded(settings, param)
      zeros = lambda: jnp.zeros_like(x, jnp.uint8 if in_codes else jnp.float32)
      scales = lambda: blocks.zeros(x, block) if in_codes else optax.MaskedNode()
      return Moments(zeros(), zeros(), scales(), scales())  # each of its own, to be donated

    return Adam8bitState(jnp.zeros((), jnp.int32), *_by_field(per_param(new, params), params))

  def update(updates, state, params=None):
    del params
    steps = state.steps + 1

    def of_param(g: jax.Array, b1: float, b2: float, *fields: Any) -> tuple[jax.Array, Moments]:
      kept, g = Moments(*fields), g.astype(jnp.float32)
      m, v = decoded(kept, block)
      m, v = b1 * m + (1.0 - b1) * g, b2 * v + (1.0 - b2) * jnp.square(g)
      is_plain = isinstance(kept.mu_scale, optax.MaskedNode)
      most = most_ratio(b1, b2, FLOAT32, FLOAT32)
      new = kept._replace(mu=m, nu=v) if is_plain else coded(m, v, most, block)
      return adam_direction(steps, settings.eps, m, v, b1, b2), new

    b1s, b2s = (each(b, updates) for b in betas_of(settings))
    both = jax.tree.map(of_param, updates, b1s, b2s, *state[1:])
    directions = jax.tree.map(lambda _, pair: pair[0], updates, both)
    new = jax.tree.map(lambda _, pair: pair[1], updates, both)
    return directions, Adam8bitState(steps, *_by_field(new, updates))

  return optax.GradientTransformation(init, update)


def _by_field(of_params: Any, like: Any) -> list[Any]:
  """A tree like `like` of `Moments`, as a tree for each of their fields."""
  return [
    jax.tree.map(lambda _, kept, i=i: kept[i], like, of_params) for i in range(len(Moments._fields))
  ]


def _most_ratios(settings: AdamW8bit, like: Any) -> Any:
  """`most_ratio` of each parameter."""
  most = lambda b1, b2: most_ratio(b1, b2, FLOAT32, FLOAT32)
  return jax.tree.map(most, *(each(b, like) for b in betas_of(settings)))


def _check(
  settings: AdamW8bit,
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
) -> Checked:
  """What holds of the moments whatever the gradients were. See `Optimizer.check`.

  Codes have no wrong values, but scales do: they are finite and not negative. A first moment is
  within a bound of the root of the second one, which `coded` sees to.
  """

  def is_wrong(state: Adam8bitState, zero: jax.Array) -> Any:
    def of_param(most: float, *fields: Any) -> jax.Array:
      kept = Moments(*fields)
      if not isinstance(kept.mu_scale, optax.MaskedNode):
        scales = (jnp.where(x >= 0.0, x, jnp.nan) for x in (kept.mu_scale, kept.nu_scale))
        kept = Moments(kept.mu, kept.nu, *scales)
        most *= MERGED / dynamic_map.LEAST_SHARE
      m, v = decoded(kept, settings.block_size)
      bound = most * most * v + UNDERFLOW * UNDERFLOW
      return ~((v >= zero) & (v < jnp.inf) & (m * m <= bound))  # true of NaN too

    return jax.tree.map(of_param, _most_ratios(settings, state.mu), *state[1:])

  checked = check_elements(Adam8bitState, ("mu", "nu"), is_wrong, before, directions, after, armed)
  was, new = state_of(Adam8bitState, before), state_of(Adam8bitState, checked.opt_state)
  # Codes of 0 with a scale that is no number are none either.
  mend = lambda old, scale: jnp.where(armed & ~((old >= 0.0) & (old < jnp.inf)), 0.0, scale)
  mended = {
    f: jax.tree.map(mend, getattr(was, f), getattr(new, f)) for f in ("mu_scale", "nu_scale")
  }
  return checked._replace(opt_state=with_state(new._replace(**mended), checked.opt_state))


def _refit(settings: AdamW8bit, opt_state: optax.OptState) -> optax.OptState:
  """See `Optimizer.refit`: second moments that are too small for their first ones are raised."""
  old: Adam8bitState = state_of(Adam8bitState, opt_state)

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def of_param(b1: float, b2: float, *fields: Any) -> Moments:
    kept = Moments(*fields)
    m, v = decoded(kept, settings.block_size)
    if isinstance(kept.mu_scale, optax.MaskedNode):
      return kept._replace(nu=raised(m, v, b1, b2))
    return coded(m, v, most_ratio(b1, b2, FLOAT32, FLOAT32), settings.block_size)

  of_params = jax.tree.map(of_param, *(each(b, old.mu) for b in betas_of(settings)), *old[1:])
  return with_state(Adam8bitState(old.steps, *_by_field(of_params, old.mu)), opt_state)


def to_float32(settings: AdamW8bit, opt_state: optax.OptState) -> optax.OptState:
  """The state of `adamw` with float32 moments, of the same values as this one of `adamw8bit`."""
  old: Adam8bitState = state_of(Adam8bitState, opt_state)
  one = jax.jit(lambda *fields: decoded(Moments(*fields), settings.block_size))
  both = jax.tree.map(lambda *fields: one(*fields), *old[1:])
  mu, nu = (jax.tree.map(lambda _, pair, i=i: pair[i], old.mu, both) for i in range(2))
  return _replaced(opt_state, Adam8bitState, AdamState(old.steps, mu, nu))


def from_float32(settings: AdamW8bit, opt_state: optax.OptState) -> optax.OptState:
  """The state of `adamw8bit` that is nearest to this one of `adamw`.

  What `to_float32` returned becomes what it was, bit for bit.
  """
  old: AdamState = state_of(AdamState, opt_state)
  one = jax.jit(coded, static_argnums=(2, 3))
  is_coded_tree = per_param(functools.partial(is_coded, settings), old.mu)

  def of_param(m: jax.Array, v: jax.Array, in_codes: bool, most: float) -> Moments:
    if in_codes:
      return one(m.astype(jnp.float32), v.astype(jnp.float32), most, settings.block_size)
    masked = optax.MaskedNode()
    return Moments(m.astype(jnp.float32), v.astype(jnp.float32), masked, masked)

  most = _most_ratios(settings, old.mu)
  of_params = jax.tree.map(of_param, old.mu, old.nu, is_coded_tree, most)
  new = Adam8bitState(old.steps, *_by_field(of_params, old.mu))
  return _replaced(opt_state, AdamState, new)


def _replaced(opt_state: optax.OptState, kind: type, new: Any) -> optax.OptState:
  """The state of an optimizer with `new` in place of the one of a kind."""
  is_it = lambda state: isinstance(state, kind)
  return jax.tree.map(lambda s: new if is_it(s) else s, opt_state, is_leaf=is_it)
