"""Grouped-query attention with RoPE.

Letters: B batch, T queries, S keys, D d_model, N query heads, K key/value heads, H head_dim.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.layers import Linear, RMSNorm, project
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Role, residual_std, zeros
from ats_jax.ops.attention.causal import attention, cached_attention
from ats_jax.ops.remat import ATTENTION_OUT
from ats_jax.ops.rope import rope
from ats_jax.sharding.apply import reshape
from ats_jax.sharding.rules import spec

RopeTable = tuple[jax.Array, jax.Array]


class Attended(Protocol):
  """Keys and values of earlier tokens, to which new tokens are added and then attend."""

  @property
  def slots(self) -> int:
    """The number of tokens of a row that it can hold."""
    ...

  def attend(
    self,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    index_BT: jax.Array,
    *,
    window: int | None,
    soft_cap: float | None,
    sinks_N: jax.Array | None,
  ) -> tuple[jax.Array, Self]:
    """The output like the queries, and what holds the new tokens too (see `cached_attention`)."""
    ...


class KVCache(NamedTuple):
  """The keys and values of the tokens seen so far. The decoder stacks them over layers."""

  k_BSKH: jax.Array
  v_BSKH: jax.Array

  @property
  def slots(self) -> int:
    """As of `Attended`."""
    return self.k_BSKH.shape[1]

  def attend(self, q_BTNH, k_BTKH, v_BTKH, index_BT, **options) -> tuple[jax.Array, "KVCache"]:
    """As of `Attended`."""
    new = (q_BTNH, k_BTKH, v_BTKH)
    y_BTNH, *updated = cached_attention(*new, self.k_BSKH, self.v_BSKH, index_BT, **options)
    return y_BTNH, KVCache(*updated)


class Attention(nnx.Module):
  """Causal self-attention; groups of query heads share key/value heads (arXiv:2305.13245)."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs, *, window: int | None = None):
    """Draw the weights.

    Args:
      cfg: sizes and options of the attention.
      num: dtypes and implementations.
      rngs: the source of one key for each projection.
      window: how many tokens a query sees, its own included; None = all before it.
    """
    self.num, self.window = num, window
    self.soft_cap = cfg.attn_soft_cap or None
    # The op multiplies by head_dim^-1/2.
    self.stretch = cfg.attn_scale * cfg.head_dim**0.5 if cfg.attn_scale else 1.0
    d, n, k, h = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    stream, heads = {"embed": d}, {"heads": n, "head_dim": h}
    kv_heads = {"kv_heads": k, "head_dim": h}
    reads = functools.partial(
      Linear, stream, std=cfg.init_std, num=num, rngs=rngs, bias=cfg.qkv_bias
    )
    self.q, self.k, self.v = reads(heads), reads(kv_heads), reads(kv_heads)
    self.out = Linear(
      heads, stream, std=residual_std(cfg), num=num, rngs=rngs, bias=cfg.attn_out_bias
    )
    sinks = functools.partial(zeros, (n,), ("heads",), num.stored(Role.SINK), Role.SINK)
    self.sinks = sinks() if cfg.attn_sinks else None
    self.all_heads = cfg.qk_norm_scope == "all"
    width = lambda heads: heads * h if self.all_heads else h
    self.q_norm = RMSNorm(width(n), cfg, num) if cfg.qk_norm else None
    self.k_norm = RMSNorm(width(k), cfg, num) if cfg.qk_norm else None

  def __call__(
    self,
    x_BTD: jax.Array,
    table: RopeTable,
    *,
    segment_ids_BT: jax.Array | None = None,
    cache: Attended | None = None,
    index_BT: jax.Array | None = None,
    fp8: bool = False,
  ) -> tuple[jax.Array, Attended | None]:
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
    q_BTNH, k_BSKH, v_BSKH = self.heads(x_BTD, table, fp8=fp8)
    sinks_N = None if self.sinks is None else self.sinks[...]
    if cache is None:
      assert segment_ids_BT is not None
      y_BTNH = attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        segment_ids_BT=segment_ids_BT,
        max_segments=self.num.max_segments,
        kernels=self.num.kernels,
        along_row=self.num.along_row,
        window=self.window,
        soft_cap=self.soft_cap,
        sinks_N=sinks_N,
      )
    else:
      assert index_BT is not None
      y_BTNH, cache = cache.attend(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        index_BT,
        window=self.window,
        soft_cap=self.soft_cap,
        sinks_N=sinks_N,
      )
    return checkpoint_name(self.out(y_BTNH, fp8=fp8), ATTENTION_OUT), cache

  def heads(
    self, x_BTD: jax.Array, table: RopeTable, *, fp8: bool = False
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys and values, [batch, seq, heads, head_dim], as the op takes them."""
    q_BTNH, k_BSKH, v_BSKH = project(x_BTD, (self.q, self.k, self.v), fp8=fp8)
    if self.q_norm is not None and self.k_norm is not None:
      q_BTNH, k_BSKH = self._normal(q_BTNH, self.q_norm), self._normal(k_BSKH, self.k_norm)
    if self.stretch != 1.0:
      q_BTNH *= self.stretch
    q_BTNH = rope(q_BTNH, table, self.num.kernels)
    k_BSKH = rope(k_BSKH, table, self.num.kernels)
    return q_BTNH, k_BSKH, v_BSKH

  def empty_cache(self, shape: tuple[int, int, int], dtype: jnp.dtype) -> KVCache:
    """An empty cache; `shape` is [layers, batch, slots]."""
    _, kv_heads, head_dim = self.k.weight.shape[-3:]
    axes = spec(None, "batch", "seq", "kv_heads", "head_dim")
    zeros = lambda: jnp.zeros((*shape, kv_heads, head_dim), dtype, out_sharding=axes)
    return KVCache(zeros(), zeros())

  def parts(self) -> Iterator[tuple[str, Any]]:
    """Yield the parameters with the part of the model that they are counted in (`model.count`)."""
    yield "attention", (self.q, self.k, self.v, self.out, self.sinks)
    yield "norms", (self.q_norm, self.k_norm)

  def _normal(self, x_BTNH: jax.Array, norm: RMSNorm) -> jax.Array:
    if not self.all_heads:
      return norm(x_BTNH)
    batch, seq, heads, width = x_BTNH.shape
    flat = reshape(x_BTNH, (batch, seq, heads * width), axes=("batch", "seq", None))
    return reshape(norm(flat), x_BTNH.shape, axes=("batch", "seq", "heads", "head_dim"))
