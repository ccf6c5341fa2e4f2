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
from ats_jax.model.attention import Attention, KVCache, RopeTable
from ats_jax.model.layer_kinds import LayerKind
from ats_jax.model.layers import MLP, RMSNorm
from ats_jax.model.mod import Depth, Pass
from ats_jax.model.numerics import Numerics
from ats_jax.model.random import Purpose, maybe_fold
from ats_jax.model.stats import LayerStats, MoEStats
from ats_jax.ops.attention.causal import ROW_AXES
from ats_jax.ops.rope import Scaling, rope_table
from ats_jax.sharding.apply import of_own_rows, reshard

if TYPE_CHECKING:
  from ats_jax.model.latent_attention import LatentCache


class Tokens(NamedTuple):
  """What a block knows of its tokens beside their activations.

  Attributes:
    positions_BT: int32, in their document.
    segment_ids_BT: int32; tokens of different segments do not see each other; 0 = padding.
    rope: cosines and sines of the positions.
    slot_BT: int32 where their keys and values go in a cache; None without one.
    window_rope: `rope` of layers with a window; None = the same.
    row_ids_BT: the segment ids on every device along a row, gathered once for the attention of all
      layers; None = as they are.
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
) -> Tokens:
  """`Tokens` with the rotary tables of their positions."""
  scaling, h = rope_scaling(cfg), cfg.latent_rope_dim or cfg.head_dim
  table = rope_table(positions_BT, h, cfg.rope_theta, scaling)
  other = rope_table(positions_BT, h, cfg.window_rope_theta) if cfg.window_rope_theta else None
  row_ids_BT = reshard(segment_ids_BT, *ROW_AXES)
  return Tokens(positions_BT, segment_ids_BT, table, slot_BT, other, row_ids_BT)


def rope_scaling(cfg: ModelConfig) -> Scaling:
  """The settings of rotary frequencies as `ops.rope` takes them."""
  values = dataclasses.asdict(cfg.rope_scaling)
  kind = values.pop("name")
  if kind == "yarn" and not values["concentration"]:
    values["concentration"] = 0.1 * math.log(values["factor"]) + 1.0
  return Scaling(kind, **values)


class LayerCache(NamedTuple):
  """What generation remembers of a layer.

  Attributes:
    kv: keys and values, or what they are made of; in a layer that whole blocks skip, of the tokens
      that went through.
    taken_B: int32 places that they took; None in a layer for all tokens.
  """

  kv: "KVCache | LatentCache"
  taken_B: jax.Array | None


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zero each element with probability `rate` and scale the rest; no-op without a key."""
  if key is None or rate == 0.0:
    return x
  draw = lambda shape, cut: jax.random.bernoulli(key, 1.0 - rate, shape, out_sharding=cut)
  keep = of_own_rows(draw, x.shape, jax.typeof(x).sharding.spec)
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
    self.depth = Depth(cfg, num, rngs) if kind.mod else None

  def __call__(
    self,
    x_BTD: jax.Array,
    tokens: Tokens,
    rules: Pass,
    *,
    layer: jax.Array,
    key: jax.Array | None = None,
    cache: LayerCache | None = None,
    fp8: bool = False,
  ) -> tuple[jax.Array, LayerStats, jax.Array, LayerCache | None]:
    """Map [batch, seq, d_model] to the same shape.

    Args:
      x_BTD: the residual stream, positions cut as "residual_seq".
      tokens: about its tokens, positions cut as "seq".
      rules: of this pass.
      layer: int32 index of this layer.
      key: of this layer and micro-batch, for dropout and noise; None = neither.
      cache: what earlier tokens left (generation).
      fp8: multiply in 8 bits; not in a layer that skips tokens.

    Returns:
      The stream, statistics, which tokens went through (bool [batch, seq]), the extended cache.
    """
    if self.depth is not None:
      assert not fp8
      return self._for_some(self.depth, x_BTD, tokens, rules, layer, key, cache)
    y_BTD, kv = self._attend(x_BTD, tokens, key, None if cache is None else cache.kv, fp8)
    x_BTD = x_BTD + y_BTD
    y_BTD, moe = self._feed(x_BTD, tokens, rules, key, fp8)
    cache = None if kv is None else LayerCache(kv, None)
    return x_BTD + y_BTD, LayerStats(moe, None), tokens.segment_ids_BT > 0, cache

  def _for_some(self, depth: Depth, x_BTD, tokens, rules, layer, key, cache):
    """Only the tokens that `depth` chooses go through the block, or through its feed-forward."""
    kv = None if cache is None else cache.kv
    if self.scope == "ffn":
      y_BTD, kv = self._attend(x_BTD, tokens, key, kv)
      x_BTD = x_BTD + y_BTD
    seq = x_BTD.shape[1]
    in_all = seq if cache is None else self._places_in_all(cache, rules)
    places = rules.places(seq) if cache is None else min(seq, in_all)
    chosen, mod = depth(
      x_BTD,
      tokens.positions_BT,
      tokens.segment_ids_BT > 0,
      rules,
      layer=layer,
      key=maybe_fold(key, Purpose.DEPTH),
      places=places,
      room_B=None if cache is None else in_all - cache.taken_B,
    )
    slot_BC = None
    if cache is not None:  # an empty place goes past the end of the cache: it is not written
      slot_BC = cache.taken_B[:, None] + jnp.arange(places)
      slot_BC = jnp.where(chosen.filled_BC, slot_BC, in_all)
    positions_BC = chosen.take_ids(tokens.positions_BT, 0)
    segment_ids_BC = chosen.take_ids(tokens.segment_ids_BT, 0)
    some = tokens_at(self.cfg, positions_BC, segment_ids_BC, slot_BC)

    def through(x_BTD):
      x_BCD, new_kv = chosen.take(x_BTD), kv
      if self.scope == "ffn":
        y_BCD, moe = self._feed(x_BCD, some, rules, key)
      else:
        attended_BCD, new_kv = self._attend(x_BCD, some, key, kv)
        y_BCD, moe = self._feed(x_BCD + attended_BCD, some, rules, key)
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

  def _places_in_all(self, cache: LayerCache, rules: Pass) -> int:
    """Places of a whole row, of which a cache holds keys and values of all or of these tokens."""
    length = cache.kv[0].shape[1]
    return rules.places(length) if self.scope == "ffn" else length

  def _attend(
    self,
    x_BTD: jax.Array,
    tokens: Tokens,
    key: jax.Array | None,
    kv: Any,
    fp8: bool = False,
  ) -> tuple[jax.Array, Any]:
    rope = tokens.rope
    if self.has_window and tokens.window_rope is not None:
      rope = tokens.window_rope
    ids_BT = tokens.segment_ids_BT if tokens.row_ids_BT is None else tokens.row_ids_BT
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
    self, x_BTD: jax.Array, tokens: Tokens, rules: Pass, key: jax.Array | None, fp8: bool = False
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
