"""The router of a mixture of experts: which experts a token goes to, and with what weights.

Letters: B batch, T seq, D d_model, E expert slots with the null experts behind, K choices, G
groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model.layers import Weight
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Buffer, Role, zero_buffer, zeros
from ats_jax.model.stats import MoEStats
from ats_jax.ops.routing import RoutingRule, route
from ats_jax.sharding.apply import draw_own_rows, einsum, ensure_sharding

TOKEN_AXES = ("batch", "seq")  # each device routes its own tokens of the stream
CLOSED = -1e30  # the logit of an expert that a token cannot go to; exp() of it is 0


class Routing(NamedTuple):
  """The routing of tokens to experts.

  Attributes:
    expert_BTK: int32 expert of each choice; the number of slots = none (padding, null experts).
    weight_BTK: float32 weight of each choice.
  """

  expert_BTK: jax.Array
  weight_BTK: jax.Array


class Router(Weight):
  """Top-k router in float32, balanced by a bias on the selection alone (arXiv:2408.15664).

  Buffers: `bias_E` (added to logits or scores when experts are chosen), `load_E` (the share of all
  choices that fell on each expert in the step before, for the balance loss). With spare slots
  also `active_S`, and for experts that surgery has split in two `side_S`, `direction_SD` and
  `penalty_S`: a token on the other side of the plane loses `penalty` in that expert's logit.
  """

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs):
    moe = self.cfg = cfg.moe
    self.kernels = num.kernels
    self.num_slots = moe.num_experts + moe.spare_experts
    outputs = self.num_slots + moe.null_experts
    width = cfg.model.d_model
    sizes, std = {"embed": width, "router": outputs}, cfg.model.init_std
    super().__init__(sizes, role=Role.ROUTER, std=std, num=num, rngs=rngs)
    wide = num.stored(Role.ROUTER)
    self.offset = zeros((outputs,), ("router",), wide, Role.BIAS) if moe.router_bias else None
    self.bias_E = zero_buffer((outputs,), ("router",), wide)
    self.load_E = zero_buffer((outputs,), ("router",), wide)
    self.load_E[...] = self._initially_open(moe) / (moe.num_experts + moe.null_experts)
    if moe.spare_experts:
      of_slots = (self.num_slots,)
      self.active_S = Buffer(self._initially_open(moe)[: self.num_slots], axes=("router",))
      self.side_S = zero_buffer(of_slots, ("router",), wide)
      self.penalty_S = zero_buffer(of_slots, ("router",), wide)
      self.direction_SD = zero_buffer((self.num_slots, width), ("router", None), wide)

  def _initially_open(self, moe) -> jax.Array:
    """1 for the experts in use at the start, else 0; idle slots are spread over groups."""
    idle_before = jnp.arange(self.num_slots + 1) * moe.spare_experts // self.num_slots
    used = jnp.diff(idle_before) == 0
    null = jnp.ones(moe.null_experts, bool)
    return jnp.concatenate([used, null]).astype(self.bias_E.dtype)

  def is_open(self) -> jax.Array:
    """1 for each expert that tokens can go to, 0 for an idle slot; shaped like `bias_E`."""
    ones = jnp.ones_like(self.bias_E[...])
    if not self.cfg.spare_experts:
      return ones
    return ones.at[..., : self.num_slots].set(self.active_S[...])

  def __call__(
    self, x_BTD: jax.Array, valid_BT: jax.Array, noise_key: jax.Array | None = None
  ) -> tuple[Routing, MoEStats]:
    """Route each valid token to `top_k` experts.

    Args:
      x_BTD: normalised activations [batch, seq, d_model].
      valid_BT: bool; the others are padding and go nowhere.
      noise_key: for `moe.noise`; None = no noise.
    """
    moe, valid_BT = self.cfg, ensure_sharding(valid_BT, *TOKEN_AXES)
    x_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    logits_BTE = self._close(x_BTD, self.logits(x_BTD) / moe.temperature)
    noisy_BTE = logits_BTE
    if moe.noise and noise_key is not None:
      dtype, sharding = logits_BTE.dtype, jax.typeof(logits_BTE).sharding.spec
      draw = lambda shape, cut: jax.random.normal(noise_key, shape, dtype, out_sharding=cut)
      noise_BTE = draw_own_rows(draw, logits_BTE.shape, sharding)
      noisy_BTE = logits_BTE + moe.noise * noise_BTE
    selection_BTE = self._selection(jax.lax.stop_gradient(noisy_BTE))
    rule = RoutingRule(moe.top_k, moe.score, moe.renormalize and moe.top_k > 1, moe.route_scale)
    expert_BTK, weight_BTK, load_BE = route(logits_BTE, selection_BTE, valid_BT, rule, self.kernels)
    goes_BTK = valid_BT[..., None] & (expert_BTK < self.num_slots)
    routing = Routing(jnp.where(goes_BTK, expert_BTK, self.num_slots), weight_BTK)
    return routing, self._stats(logits_BTE, load_BE, valid_BT)

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """The logits [batch, seq, experts] of activations in float32, before the temperature.

    A router of another kind overrides this.
    """
    logits_BTE = einsum(
      "BTD,DE->BTE",
      x_BTD,
      self.value(x_BTD.dtype),
      axes=(*TOKEN_AXES, "router"),
      precision=jax.lax.Precision.HIGHEST,
    )
    return logits_BTE if self.offset is None else logits_BTE + self.offset[...]

  def _scores(self, logits_BTE: jax.Array) -> jax.Array:
    return jax.nn.softmax(logits_BTE) if self.cfg.score == "softmax" else jax.nn.sigmoid(logits_BTE)

  def _selection(self, logits_BTE: jax.Array) -> jax.Array:
    """The biased logits or scores that top-k chooses from, -inf outside the best groups."""
    # By default on the logits, not the scores as published: docs/internals/adr/0007-balance.md.
    on_scores = self.cfg.bias_on == "scores"
    to_bias_BTE = self._scores(logits_BTE) if on_scores else logits_BTE
    biased_BTE = to_bias_BTE + self.bias_E[...].astype(logits_BTE.dtype)
    biased_BTE = jnp.where(logits_BTE > CLOSED / 2, biased_BTE, -jnp.inf)
    groups = self.cfg.num_groups
    if groups > 1:  # arXiv:2412.19437, section 2.1.2: by the best two; 2405.04434, 2.2.2: the best
      by_group = lambda a_BTE: a_BTE.reshape(*a_BTE.shape[:2], groups, -1)
      scores_BTE = biased_BTE if on_scores else self._scores(biased_BTE)
      scores_BTGE = by_group(jnp.where(biased_BTE > CLOSED / 2, scores_BTE, 0.0))
      counted = 1 if self.cfg.group_score == "max" else min(2, scores_BTGE.shape[-1])
      best = jax.lax.top_k(scores_BTGE, counted)[0]
      _, group_BTK = jax.lax.top_k(jnp.sum(best, axis=-1), self.cfg.top_groups)
      allowed_BTG = jnp.any(group_BTK[..., None] == jnp.arange(groups), axis=-2)
      biased_BTGE = jnp.where(allowed_BTG[..., None], by_group(biased_BTE), -jnp.inf)
      biased_BTE = biased_BTGE.reshape(biased_BTE.shape)
    return biased_BTE

  def _close(self, x_BTD: jax.Array, logits_BTE: jax.Array) -> jax.Array:
    """Set the logits of idle slots to CLOSED, and penalise the far half of a split expert."""
    if not self.cfg.spare_experts:
      return logits_BTE
    slots_BTS, null_BTE = jnp.split(logits_BTE, [self.num_slots], axis=-1)
    away_BTS = self.side_S[...] * einsum(
      "BTD,SD->BTS",
      jax.lax.stop_gradient(x_BTD),
      self.direction_SD[...].astype(x_BTD.dtype),
      axes=(*TOKEN_AXES, "router"),
      precision=jax.lax.Precision.HIGHEST,
    )
    # Exactly one of the sides +1 and -1 is open, on the plane itself too.
    is_away_BTS = (away_BTS < 0) | ((away_BTS == 0) & (self.side_S[...] < 0))
    slots_BTS -= jnp.where(is_away_BTS, self.penalty_S[...], 0.0)
    slots_BTS = jnp.where(self.active_S[...] > 0, slots_BTS, CLOSED)
    return jnp.concatenate([jnp.maximum(slots_BTS, CLOSED), null_BTE], axis=-1)

  def _stats(self, logits_BTE, load_BE, valid_BT) -> MoEStats:
    valid_BT = valid_BT.astype(logits_BTE.dtype)
    probs_BTE = self._scores(logits_BTE)
    if self.cfg.score == "sigmoid":
      probs_BTE /= jnp.sum(probs_BTE, axis=-1, keepdims=True) + 1e-20
    num_open = jnp.sum(self.is_open())
    prob_BE = einsum("BTE,BT->BE", probs_BTE, valid_BT, axes=("batch", "router"))
    tokens_B1 = jnp.maximum(jnp.sum(valid_BT, axis=1, keepdims=True), 1.0)
    share_BE = jax.lax.stop_gradient(load_BE) / (tokens_B1 * self.cfg.top_k)
    log_probs_BTE = jnp.log(jnp.maximum(probs_BTE, 1e-30))
    total = lambda a_BT: jnp.sum(a_BT * valid_BT)
    return MoEStats(
      tokens=jnp.sum(valid_BT),
      load_E=jnp.sum(load_BE, axis=0),
      balance=num_open * jnp.sum(self.load_E[...] * jnp.sum(prob_BE, axis=0)),
      sequence_balance=num_open * jnp.sum(share_BE * prob_BE / tokens_B1),
      z=total(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))),
      entropy=total(-jnp.sum(probs_BTE * log_probs_BTE, axis=-1)),
      confidence=total(jnp.max(probs_BTE, axis=-1)),
      dropped=jnp.zeros((), valid_BT.dtype),
      overflow=jnp.zeros((), valid_BT.dtype),
    )
