"""One pre-norm block: attention and a dense or sparse feed-forward, for all tokens or some.

Letters: B batch, T seq, D d_model, C places of a row in a layer that skips tokens.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config, ModelConfig
from ats_jax.model.attention import Attention, RopeTable
from ats_jax.model.forward_pass import Pass
from ats_jax.model.layer_kinds import LayerKind
from ats_jax.model.layers import MLP, RMSNorm
from ats_jax.model.numerics import Numerics
from ats_jax.model.random import Purpose, maybe_fold
from ats_jax.model.stats import LayerStats, MoEStats
from ats_jax.ops.attention.causal import ROW_AXES, largest_logit
from ats_jax.ops.rope import Scaling, rope_table
from ats_jax.sharding.apply import draw_own_rows, reshard

if TYPE_CHECKING:
  from ats_jax.model.mod import DepthRouter


class TokenContext(NamedTuple):
  """What a block is given about its tokens in addition to their activations.

  Attributes:
    positions_BT: int32 position of each token in its document.
    segment_ids_BT: int32; tokens of different segments do not see each other; 0 = padding.
    rope: cosines and sines of the positions.
    slot_BT: int32 cache slot of each token's keys and values; None without a cache.
    window_rope: the cosines and sines of layers with a window; None = `rope`.
    row_ids_BT: the segment ids of whole rows on every device along a row, gathered once for the
      attention of all layers; None = `segment_ids_BT`.
  """

  positions_BT: jax.Array
  segment_ids_BT: jax.Array
  rope: RopeTable
  slot_BT: jax.Array | None = None
  window_rope: RopeTable | None = None
  row_ids_BT: jax.Array | None = None


def tokens_at(
  cfg: ModelConfig,
  positions_BT: jax.Array,
  segment_ids_BT: jax.Array,
  slot_BT: jax.Array | None = None,
) -> TokenContext:
  """Build a `TokenContext`, with the rotary tables of the positions."""
  scaling, h = rope_scaling(cfg), cfg.latent_rope_dim or cfg.head_dim
  table = rope_table(positions_BT, h, cfg.rope_theta, scaling)
  other = rope_table(positions_BT, h, cfg.window_rope_theta) if cfg.window_rope_theta else None
  row_ids_BT = reshard(segment_ids_BT, *ROW_AXES)
  return TokenContext(positions_BT, segment_ids_BT, table, slot_BT, other, row_ids_BT)


def rope_scaling(cfg: ModelConfig) -> Scaling:
  """Translate `model.rope_scaling` to the arguments of `ops.rope`."""
  values = dataclasses.asdict(cfg.rope_scaling)
  kind = values.pop("name")
  if kind == "yarn" and not values["concentration"]:
    values["concentration"] = 0.1 * math.log(values["factor"]) + 1.0
  return Scaling(kind, **values)


class LayerCache(NamedTuple):
  """The state of one layer during generation.

  Attributes:
    kv: keys and values (`Attended`), or the latents that they are computed from. With
      `mod.scope=block`, a layer that skips tokens holds only those of tokens that went through.
    taken_B: int32, how many places each row has used; None in a layer that skips no token.
  """

  kv: Any
  taken_B: jax.Array | None


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zero each element with probability `rate` and scale the rest; no-op without a key."""
  if key is None or rate == 0.0:
    return x
  draw = lambda shape, spec: jax.random.bernoulli(key, 1.0 - rate, shape, out_sharding=spec)
  keep = draw_own_rows(draw, x.shape, jax.typeof(x).sharding.spec)
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


class Block(nnx.Module):
  """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs, kind: LayerKind):
    model = self.cfg = cfg.model
    self.scope, self.has_window = cfg.mod.scope, kind.window
    norm = lambda: RMSNorm(model.d_model, model, num)
    self.attn_norm = norm()
    # Layers that most models have none of are imported where one is made.
    if model.kv_latent_dim:
      from ats_jax.model.latent_attention import LatentAttention

      self.attn = LatentAttention(model, num, rngs)
    else:
      self.attn = Attention(model, num, rngs, window=model.window if kind.window else None)
    self.attn_post_norm = norm() if model.post_norms else None
    self.mlp_norm = norm()
    if kind.moe:
      from ats_jax.model.moe import MoE

      self.mlp = MoE(cfg, num, rngs)
    else:
      self.mlp = MLP(model, num, rngs, model.d_ff)
    self.mlp_post_norm = norm() if model.post_norms else None
    if kind.mod:
      from ats_jax.model.mod import DepthRouter

      self.depth = DepthRouter(cfg, num, rngs)
    else:
      self.depth = None

  def __call__(
    self,
    x_BTD: jax.Array,
    tokens: TokenContext,
    rules: Pass,
    *,
    layer: jax.Array,
    key: jax.Array | None = None,
    cache: LayerCache | None = None,
    fp8: bool = False,
  ) -> tuple[jax.Array, LayerStats, jax.Array, LayerCache | None]:
    """Map [batch, seq, d_model] to the same shape.

    Args:
      x_BTD: the residual stream, its positions sharded as "seq".
      tokens: positions, segments and cache slots, their positions sharded as "seq".
      rules: how sparse layers choose in this pass.
      layer: int32 index of this layer.
      key: the key of this layer and micro-batch, for dropout and noise; None = neither.
      cache: the layer's state after the earlier tokens (generation only).
      fp8: multiply in 8 bits; not supported in a layer that skips tokens.

    Returns:
      The residual stream, statistics, which tokens went through (bool [batch, seq]), and the
      extended cache (None without one).
    """
    if self.depth is not None:
      assert not fp8
      return self._route_through(self.depth, x_BTD, tokens, rules, layer, key, cache)
    y_BTD, kv = self._attend(x_BTD, tokens, key, None if cache is None else cache.kv, fp8)
    x_BTD = x_BTD + y_BTD
    y_BTD, moe = self._feed(x_BTD, tokens, rules, key, fp8)
    cache = None if kv is None else LayerCache(kv, None)
    return x_BTD + y_BTD, LayerStats(moe, None), tokens.segment_ids_BT > 0, cache

  def _route_through(self, depth: "DepthRouter", x_BTD, tokens, rules, layer, key, cache):
    """Only the tokens that `depth` chooses go through the block, or through its feed-forward."""
    kv = None if cache is None else cache.kv
    if self.scope == "ffn":
      y_BTD, kv = self._attend(x_BTD, tokens, key, kv)
      x_BTD = x_BTD + y_BTD
    seq = x_BTD.shape[1]
    total_places = seq if cache is None else self._total_places(cache, rules)
    places = rules.places(seq) if cache is None else min(seq, total_places)
    chosen, mod = depth(
      x_BTD,
      tokens.positions_BT,
      tokens.segment_ids_BT > 0,
      rules,
      layer=layer,
      key=maybe_fold(key, Purpose.DEPTH),
      places=places,
      free_places_B=None if cache is None else total_places - cache.taken_B,
    )
    slot_BC = None
    if cache is not None:  # an empty place goes past the end of the cache: it is not written
      slot_BC = cache.taken_B[:, None] + jnp.arange(places)
      slot_BC = jnp.where(chosen.filled_BC, slot_BC, total_places)
    positions_BC = chosen.take_ids(tokens.positions_BT, 0)
    segment_ids_BC = chosen.take_ids(tokens.segment_ids_BT, 0)
    routed = tokens_at(self.cfg, positions_BC, segment_ids_BC, slot_BC)

    def through(x_BTD):
      x_BCD, new_kv = chosen.take(x_BTD), kv
      if self.scope == "ffn":
        y_BCD, moe = self._feed(x_BCD, routed, rules, key)
      else:
        attended_BCD, new_kv = self._attend(x_BCD, routed, key, kv)
        y_BCD, moe = self._feed(x_BCD + attended_BCD, routed, rules, key)
        y_BCD += attended_BCD
      return chosen.put(y_BCD), new_kv, moe

    if cache is None:
      y_BTD, _, moe = through(x_BTD)
    else:  # often no token of the few at hand goes through: then nothing is computed
      moe = None
      y_BTD, kv = jax.lax.cond(
        jnp.any(chosen.filled_BC),
        lambda x_BTD: through(x_BTD)[:2],
        lambda x_BTD: (jnp.zeros_like(x_BTD), kv),
        x_BTD,
      )
      assert kv is not None
      taken_B = cache.taken_B + jnp.sum(chosen.filled_BC, axis=1, dtype=jnp.int32)
      cache = LayerCache(kv, taken_B)
    return x_BTD + y_BTD, LayerStats(moe, mod), chosen.slot_BT < places, cache

  def _total_places(self, cache: LayerCache, rules: Pass) -> int:
    """The number of places that a whole row of the cache's length has in this layer."""
    length = cache.kv.slots
    return rules.places(length) if self.scope == "ffn" else length

  def largest_logit(self, x_BTD: jax.Array, tokens: TokenContext) -> jax.Array:
    """The largest logit of attention; -inf if not all tokens go through it."""
    if self.depth is not None and self.scope == "block":
      return jnp.full((), -jnp.inf)
    rope, ids_BT = self._seen_by(tokens)
    q_BTNH, k_BTKH, _ = self.attn.heads(self.attn_norm(x_BTD), rope)
    return largest_logit(q_BTNH, k_BTKH, ids_BT, self.attn.window)

  def _seen_by(self, tokens: TokenContext) -> tuple[RopeTable, jax.Array]:
    """The rotary table and the segment ids of this layer's attention."""
    rope = tokens.rope
    if self.has_window and tokens.window_rope is not None:
      rope = tokens.window_rope
    return rope, tokens.segment_ids_BT if tokens.row_ids_BT is None else tokens.row_ids_BT

  def _attend(
    self,
    x_BTD: jax.Array,
    tokens: TokenContext,
    key: jax.Array | None,
    kv: Any,
    fp8: bool = False,
  ) -> tuple[jax.Array, Any]:
    rope, ids_BT = self._seen_by(tokens)
    y_BTD, kv = self.attn(
      self.attn_norm(x_BTD),
      rope,
      segment_ids_BT=ids_BT,
      cache=kv,
      index_BT=tokens.slot_BT,
      fp8=fp8,
    )
    if self.attn_post_norm is not None:
      y_BTD = self.attn_post_norm(y_BTD)
    return dropout(y_BTD, self.cfg.dropout, maybe_fold(key, Purpose.ATTENTION_DROPOUT)), kv

  def _feed(
    self,
    x_BTD: jax.Array,
    tokens: TokenContext,
    rules: Pass,
    key: jax.Array | None,
    fp8: bool = False,
  ) -> tuple[jax.Array, MoEStats | None]:
    x_BTD, moe = self.mlp_norm(x_BTD), None
    if isinstance(self.mlp, MLP):
      y_BTD = self.mlp(x_BTD, fp8=fp8)
    else:
      noise_key = maybe_fold(key, Purpose.EXPERT_NOISE)
      y_BTD, moe = self.mlp(
        x_BTD, tokens.segment_ids_BT > 0, training=rules.training, key=noise_key, fp8=fp8
      )
    if self.mlp_post_norm is not None:
      y_BTD = self.mlp_post_norm(y_BTD)
    return dropout(y_BTD, self.cfg.dropout, maybe_fold(key, Purpose.MLP_DROPOUT)), moe
