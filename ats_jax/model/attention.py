"""Grouped-query attention with RoPE.

Letters: B batch, T queries, S keys, D d_model, N query heads, K key/value heads, H head_dim.
"""

from typing import NamedTuple

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.layers import Linear, RMSNorm, project
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import residual_std
from ats_jax.ops.attention import attention, cached_attention
from ats_jax.ops.rope import rope

RopeTable = tuple[jax.Array, jax.Array]


class KVCache(NamedTuple):
  """Keys and values of the tokens seen so far; stacked over layers by the decoder."""

  k_BSKH: jax.Array
  v_BSKH: jax.Array


class Attention(nnx.Module):
  """Causal self-attention; groups of query heads share key/value heads (arXiv:2305.13245)."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs):
    self.num = num
    d, n, k, h = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    stream, heads = {"embed": d}, {"heads": n, "head_dim": h}
    kv_heads = {"kv_heads": k, "head_dim": h}
    self.q = Linear(stream, heads, std=cfg.init_std, num=num, rngs=rngs)
    self.k = Linear(stream, kv_heads, std=cfg.init_std, num=num, rngs=rngs)
    self.v = Linear(stream, kv_heads, std=cfg.init_std, num=num, rngs=rngs)
    self.out = Linear(heads, stream, std=residual_std(cfg), num=num, rngs=rngs)
    self.q_norm = RMSNorm(h, cfg.norm_eps, num) if cfg.qk_norm else None
    self.k_norm = RMSNorm(h, cfg.norm_eps, num) if cfg.qk_norm else None

  def __call__(
    self,
    x_BTD: jax.Array,
    table: RopeTable,
    *,
    segment_ids_BT: jax.Array | None = None,
    cache: KVCache | None = None,
    index_BT: jax.Array | None = None,
    fp8: bool = False,
  ) -> tuple[jax.Array, KVCache | None]:
    """Attend within segments (training) or to a cache (generation).

    Args:
      x_BTD: normalised activations [batch, seq, d_model] in the compute dtype.
      table: cosines and sines from `rope_table`.
      segment_ids_BT: a token sees earlier tokens of its own segment only.
      cache: keys and values to extend; with it, `index_BT` says in which slot each token goes.
      index_BT: int32 slots; a token sees the slots up to its own.
      fp8: multiply by the weights in 8 bits.

    Returns:
      The output [batch, seq, d_model] and the extended cache (None without one).
    """
    q_BTNH, k_BSKH, v_BSKH = project(x_BTD, (self.q, self.k, self.v), fp8=fp8)
    if self.q_norm is not None and self.k_norm is not None:
      q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH)
    q_BTNH = checkpoint_name(rope(q_BTNH, table, self.num.kernels), "attn_q")
    k_BSKH = checkpoint_name(rope(k_BSKH, table, self.num.kernels), "attn_k")
    v_BSKH = checkpoint_name(v_BSKH, "attn_v")
    if cache is None:
      assert segment_ids_BT is not None
      y_BTNH = attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        segment_ids_BT=segment_ids_BT,
        max_segments=self.num.max_segments,
        kernels=self.num.kernels,
      )
    else:
      assert index_BT is not None
      y_BTNH, *updated = cached_attention(q_BTNH, k_BSKH, v_BSKH, *cache, index_BT)
      cache = KVCache(*updated)
    return self.out(y_BTNH, fp8=fp8), cache
