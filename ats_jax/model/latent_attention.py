"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Letters: B batch, T queries, S slots of a cache, D d_model, N heads, H width of a key, V of a value,
C of the latent, R of the rotated part of a key.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.layers import Linear, RMSNorm
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import residual_std
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.latent import cached_latent_attention
from ats_jax.ops.remat import ATTENTION_OUT
from ats_jax.ops.rope import rope
from ats_jax.sharding.apply import einsum, ensure_sharding, reshape, reshard
from ats_jax.sharding.rules import spec

LATENT_EPS = 1e-6  # of the latents' norms, as published, whatever model.norm_eps is
QUERY_AXES = ("batch", "seq", "heads", "head_dim")


class LatentCache(NamedTuple):
  """The latents from which keys and values of the tokens seen so far are computed.

  The decoder stacks them over layers.

  Attributes:
    latent_BSC: the normalised latent of each slot.
    rotated_BSR: the rotated part of each slot's key, shared by all heads.
  """

  latent_BSC: jax.Array
  rotated_BSR: jax.Array

  @property
  def slots(self) -> int:
    """The number of tokens of a row that it can hold."""
    return self.latent_BSC.shape[1]

  def attend(
    self, q_BTNC, turned_BTNR, latent_BTC, rotated_BTR, index_BT, *, scale
  ) -> tuple[jax.Array, "LatentCache"]:
    """Attend after the new tokens are added: see `cached_latent_attention`."""
    new = (q_BTNC, turned_BTNR, latent_BTC, rotated_BTR)
    y_BTNC, *updated = cached_latent_attention(*new, *self, index_BT, scale=scale)
    return y_BTNC, LatentCache(*updated)


class LatentAttention(nnx.Module):
  """Causal self-attention whose keys and values are made of one narrow latent of a token.

  Of the H numbers of a query and of a key the last R carry the position; those of the key are the
  same for all heads.
  """

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs):
    """Draw the weights; `rngs` gives one key for each projection."""
    self.num, self.num_rotated, self.window = num, cfg.latent_rope_dim, None
    self.num_fixed = cfg.head_dim - cfg.latent_rope_dim
    # The op multiplies by head_dim^-1/2.
    self.stretch = cfg.attn_scale * cfg.head_dim**0.5 if cfg.attn_scale else 1.0
    latent, n = cfg.kv_latent_dim, cfg.num_heads
    stream, queries = {"embed": cfg.d_model}, {"heads": n, "head_dim": cfg.head_dim}
    linear = functools.partial(Linear, num=num, rngs=rngs)
    norm = lambda width: RMSNorm(width, cfg, num, eps=LATENT_EPS)
    if narrow := cfg.q_latent_dim:
      self.q_down = linear(stream, {"latent": narrow}, std=cfg.init_std)
      self.q_norm = norm(narrow)
      self.q = linear({"latent_rows": narrow}, queries, std=cfg.init_std)
    else:
      self.q_down = self.q_norm = None
      self.q = linear(stream, queries, std=cfg.init_std)
    self.kv_down = linear(stream, {"latent": latent + self.num_rotated}, std=cfg.init_std)
    self.kv_norm = norm(latent)
    made = {"heads": n, "head_dim": self.num_fixed + cfg.v_head_dim}
    self.kv = linear({"latent_rows": latent}, made, std=cfg.init_std)
    self.out = linear({"heads": n, "head_dim": cfg.v_head_dim}, stream, std=residual_std(cfg))

  def __call__(
    self,
    x_BTD: jax.Array,
    table: tuple[jax.Array, jax.Array],
    *,
    segment_ids_BT: jax.Array | None = None,
    cache: LatentCache | None = None,
    index_BT: jax.Array | None = None,
    fp8: bool = False,
  ) -> tuple[jax.Array, LatentCache | None]:
    """Attend within segments (training) or to a cache; arguments as in `Attention`."""
    if cache is None:
      assert segment_ids_BT is not None
      q_BTNH, k_BTNH, v_BTNV = self.heads(x_BTD, table, fp8=fp8)
      y_BTNV = attention(
        q_BTNH,
        k_BTNH,
        v_BTNV,
        segment_ids_BT=segment_ids_BT,
        max_segments=self.num.max_segments,
        kernels=self.num.kernels,
        along_row=self.num.along_row,
      )
    else:
      assert index_BT is not None
      q_BTNH = self._queries(x_BTD, table, fp8)
      latent_BTC, rotated_BTR = self._latents(x_BTD, table, fp8)
      y_BTNV, cache = self._attend_to(cache, q_BTNH, latent_BTC, rotated_BTR, index_BT)
    return checkpoint_name(self.out(y_BTNV, fp8=fp8), ATTENTION_OUT), cache

  def heads(
    self, x_BTD: jax.Array, table: Any, *, fp8: bool = False
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys and values, [batch, seq, heads, width], as the op takes them."""
    q_BTNH = self._queries(x_BTD, table, fp8)
    latent_BTC, rotated_BTR = self._latents(x_BTD, table, fp8)
    made_BTNx = self.kv(latent_BTC, fp8=fp8)
    fixed_BTNx, v_BTNV = jnp.split(made_BTNx, [self.num_fixed], axis=-1)
    k_BTNH = jnp.concatenate([fixed_BTNx, self._for_all_heads(rotated_BTR, q_BTNH)], axis=-1)
    return q_BTNH, k_BTNH, v_BTNV

  def _queries(self, x_BTD: jax.Array, table: Any, fp8: bool) -> jax.Array:
    if self.q_down is not None and self.q_norm is not None:
      x_BTD = self.q_norm(self.q_down(x_BTD, fp8=fp8))
    q_BTNH = self.q(x_BTD, fp8=fp8)
    if self.stretch != 1.0:
      q_BTNH *= self.stretch
    fixed_BTNx, rotated_BTNR = jnp.split(q_BTNH, [self.num_fixed], axis=-1)
    rotated_BTNR = rope(rotated_BTNR, table, self.num.kernels)
    return jnp.concatenate([fixed_BTNx, rotated_BTNR], axis=-1)

  def _latents(self, x_BTD: jax.Array, table: Any, fp8: bool) -> tuple[jax.Array, jax.Array]:
    """Compute what a cache stores of each token: the latent and the rotated part of its keys."""
    both_BTx = self.kv_down(x_BTD, fp8=fp8)
    latent_BTC, part_BTR = jnp.split(both_BTx, [both_BTx.shape[-1] - self.num_rotated], axis=-1)
    part_BTR = ensure_sharding(part_BTR, "batch", "seq", "latent")  # narrow, unlike the stream
    part_BT1R = reshape(
      part_BTR, (*x_BTD.shape[:2], 1, self.num_rotated), axes=("batch", "seq", None, "head_dim")
    )
    rotated_BT1R = rope(part_BT1R, table, self.num.kernels)
    return self.kv_norm(latent_BTC), jnp.squeeze(rotated_BT1R, axis=2)

  def _for_all_heads(self, rotated_BTR: jax.Array, q_BTNH: jax.Array) -> jax.Array:
    shape = (*q_BTNH.shape[:-1], self.num_rotated)
    return reshard(jnp.broadcast_to(rotated_BTR[:, :, None], shape), *QUERY_AXES)

  def _attend_to(self, cache, q_BTNH, latent_BTC, rotated_BTR, index_BT):
    """Attend to latents, without making keys and values of the slots.

    A score q . (W latent) is (W^T q) . latent, and a mean of W latent is W times that of latents.
    """
    weight_CNx = reshard(self.kv.value(q_BTNH.dtype), "latent", "heads", "head_dim")
    keys_CNx, values_CNV = jnp.split(weight_CNx, [self.num_fixed], axis=-1)
    fixed_BTNx, rotated_q_BTNR = jnp.split(q_BTNH, [self.num_fixed], axis=-1)
    q_BTNC = einsum("BTNx,CNx->BTNC", fixed_BTNx, keys_CNx, axes=QUERY_AXES)
    new = (q_BTNC, rotated_q_BTNR, latent_BTC, rotated_BTR)
    y_BTNC, cache = cache.attend(*new, index_BT, scale=q_BTNH.shape[-1] ** -0.5)
    return einsum("BTNC,CNV->BTNV", y_BTNC, values_CNV, axes=QUERY_AXES), cache

  def empty_cache(self, shape: tuple[int, int, int], dtype: jnp.dtype) -> LatentCache:
    """An empty cache; `shape` is [layers, batch, slots]."""
    axes = spec(None, "batch", "seq", "latent")
    zeros = lambda width: jnp.zeros((*shape, width), dtype, out_sharding=axes)
    return LatentCache(zeros(self.kv.weight.shape[-3]), zeros(self.num_rotated))

  def parts(self) -> Iterator[tuple[str, Any]]:
    """Yield the parameters with the part of the model that they are counted in (`model.count`)."""
    yield "attention", (self.q_down, self.q, self.kv_down, self.kv, self.out)
    yield "norms", (self.q_norm, self.kv_norm)
