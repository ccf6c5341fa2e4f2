"""Causal attention over packed rows and over a cache: grouped queries, and multi-head latents.

Letters: B batch, T queries, S keys, D d_model, N query heads, K key/value heads, H head_dim.
"""

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ats_jax.pytorch.kernels import asked_kernel, kernel_for
from ats_jax.pytorch.layers import Linear, RMSNorm, rotate
from ats_jax.pytorch.settings import Settings

LATENT_EPS = 1e-6  # of the latents' norms, as published, whatever model.norm_eps is
RopeTable = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Tokens:
  """What a layer knows of its tokens beside their activations.

  Attributes:
    positions_BT: in their document.
    segment_ids_BT: tokens of different segments do not see each other; 0 = padding.
    order_BT: how many tokens of the layer stand before each one in its row.
    rope: cosines and sines of the positions.
    window_rope: those of layers with a window.
    alone: each row is one document, and new: every token sees all before it.
    runs: result of `runs_of`, where kernels use it.
  """

  positions_BT: Tensor
  segment_ids_BT: Tensor
  order_BT: Tensor
  rope: RopeTable
  window_rope: RopeTable
  alone: bool = False
  runs: tuple[Tensor, Tensor] | None = None


@dataclasses.dataclass
class KeyCache:
  """What attention remembers of the tokens that went through a layer, padding among them.

  Attributes:
    arrays: [batch, slots, ...] each: keys and values, or latents and the rotated part of keys.
    segment_ids_BS: segment of the token in each slot; 0 = padding.
    order_BS: number of the token in each slot among those of its row, padding left out.
    count_B: number of tokens of each row that are no padding.
  """

  arrays: tuple[Tensor, ...] = ()
  segment_ids_BS: Tensor | None = None
  order_BS: Tensor | None = None
  count_B: Tensor | None = None

  def extend(self, new: tuple[Tensor, ...], tokens: Tokens) -> tuple[Tensor, ...]:
    """Append the arrays of new tokens; return those of all tokens so far."""
    joined = lambda old, more: more if old is None else torch.cat([old, more], dim=1)
    old = self.arrays or (None,) * len(new)
    self.arrays = tuple(joined(a, b) for a, b in zip(old, new, strict=True))
    self.segment_ids_BS = joined(self.segment_ids_BS, tokens.segment_ids_BT)
    self.order_BS = joined(self.order_BS, tokens.order_BT)
    return self.arrays

  def order_of(self, segment_ids_BT: Tensor) -> Tensor:
    """`Tokens.order_BT` of new tokens, and count them; padding comes first."""
    is_real_BT = (segment_ids_BT > 0).long()
    before_B1 = 0 if self.count_B is None else self.count_B[:, None]
    order_BT = (before_B1 + is_real_BT.cumsum(dim=1) - 1) * is_real_BT
    self.count_B = is_real_BT.sum(dim=1) + (0 if self.count_B is None else self.count_B)
    return order_BT


def visibility(tokens: Tokens, cache: KeyCache | None, window: int | None) -> Tensor | None:
  """Which keys each query sees, bool [batch, 1, queries, keys]; None = itself and all before."""
  if cache is None and tokens.alone and window is None:
    return None
  segment_ids_BS = tokens.segment_ids_BT if cache is None else cache.segment_ids_BS
  order_BS = tokens.order_BT if cache is None else cache.order_BS
  assert segment_ids_BS is not None and order_BS is not None
  distance_BTS = tokens.order_BT[:, :, None] - order_BS[:, None, :]
  seen_BTS = tokens.segment_ids_BT[:, :, None] == segment_ids_BS[:, None, :]
  seen_BTS = seen_BTS & (distance_BTS >= 0)
  if window is not None:
    seen_BTS = seen_BTS & (distance_BTS < window)
  # Ids that lie in memory batch by batch would hand their order on, which no fused kernel takes.
  return seen_BTS[:, None].contiguous()


def runs_of(segment_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
  """Find the first token and the last one of each token's document, int32 [batch, seq].

  Args:
    segment_ids_BT: one contiguous run for each id.
  """
  seq = segment_ids_BT.shape[1]
  at_T = torch.arange(seq, dtype=torch.int32, device=segment_ids_BT.device)
  changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  is_first, is_last = F.pad(changes, (1, 0), value=True), F.pad(changes, (0, 1), value=True)
  first_BT = torch.where(is_first, at_T, 0).cummax(dim=1).values
  last_BT = torch.where(is_last, at_T, seq).flip(1).cummin(dim=1).values.flip(1)
  return first_BT, last_BT


def attend(
  q_BTNH: Tensor,
  k_BSKH: Tensor,
  v_BSKH: Tensor,
  visible_B1TS: Tensor | None,
  *,
  scale: float,
  soft_cap: float = 0.0,
  sinks_N: Tensor | None = None,
) -> Tensor:
  """Softmax attention, in float32 where PyTorch has no kernel for it.

  Args:
    q_BTNH: queries.
    k_BSKH: keys; K divides N.
    v_BSKH: values, of any width.
    visible_B1TS: result of `visibility`.
    scale: factor of the scores.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0 = they stay as they are.
    sinks_N: a logit of each head that every query sees, with value 0.

  Returns:
    Array like the queries, as wide as the values.
  """
  groups = q_BTNH.shape[2] // k_BSKH.shape[2]
  k_BSNH, v_BSNH = (
    a if groups == 1 else a.repeat_interleave(groups, dim=2) for a in (k_BSKH, v_BSKH)
  )
  q, k, v = (a.transpose(1, 2) for a in (q_BTNH, k_BSNH, v_BSNH))
  if not soft_cap and sinks_N is None:
    y = F.scaled_dot_product_attention(
      q, k, v, attn_mask=visible_B1TS, is_causal=visible_B1TS is None, scale=scale
    )
    return y.transpose(1, 2)
  scores = scale * (q.float() @ k.float().transpose(-1, -2))
  if soft_cap:
    scores = soft_cap * torch.tanh(scores / soft_cap)
  seen = visible_B1TS
  if seen is None:
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
  scores = scores.masked_fill(torch.logical_not(seen), -torch.inf)
  if sinks_N is not None:
    sink = sinks_N.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, sink], dim=-1)
  weights = scores.softmax(dim=-1)[..., : k.shape[-2]].to(q.dtype)
  return (weights @ v).transpose(1, 2)


def attend_in_triton(
  q_BTNH: Tensor,
  k_BTKH: Tensor,
  v_BTKV: Tensor,
  tokens: Tokens,
  *,
  window: int | None,
  soft_cap: float = 0.0,
  sinks_N: Tensor | None = None,
) -> Tensor:
  """`attend` without a cache, scaled by head_dim^-1/2, by JAX's kernel (`kernels_triton`)."""
  assert tokens.runs is not None
  first_BT, last_BT = tokens.runs
  if window is not None:
    at_T = torch.arange(first_BT.shape[1], dtype=torch.int32, device=first_BT.device)
    first_BT, last_BT = first_BT.maximum(at_T - (window - 1)), last_BT.minimum(at_T + (window - 1))
  in_parts = window is not None or not tokens.alone
  sinks_N = None if sinks_N is None else sinks_N.float()
  arrays = q_BTNH, k_BTKH, v_BTKV, first_BT, last_BT, sinks_N
  return torch.ops.ats_jax.attention(*arrays, soft_cap, in_parts)[0]


class Attention(nn.Module):
  """Causal self-attention; groups of query heads share key/value heads."""

  def __init__(self, cfg: Settings, *, window: int | None):
    super().__init__()
    model = self.model = cfg.model
    self.window, self.kernel = window, asked_kernel(cfg, "attention")
    stretch = model.attn_scale * model.head_dim**0.5 if model.attn_scale else 1.0
    self.stretch, self.scale = stretch, model.head_dim**-0.5
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    self.q = Linear(model.d_model, queries, bias=model.qkv_bias)
    self.k = Linear(model.d_model, keys, bias=model.qkv_bias)
    self.v = Linear(model.d_model, keys, bias=model.qkv_bias)
    self.out = Linear(queries, model.d_model, bias=model.attn_out_bias)
    self.sinks = nn.Parameter(torch.zeros(model.num_heads)) if model.attn_sinks else None
    self.all_heads = model.qk_norm_scope == "all"
    width = lambda all_of_it: all_of_it if self.all_heads else model.head_dim
    norm = lambda width: RMSNorm(width, eps=model.norm_eps, plus_one=model.norm_plus_one)
    self.q_norm = norm(width(queries)) if model.qk_norm else None
    self.k_norm = norm(width(keys)) if model.qk_norm else None

  def forward(self, x_BTD: Tensor, tokens: Tokens, cache: KeyCache | None = None) -> Tensor:
    """Attend within segments, or also to a cache, which is extended.

    Args:
      x_BTD: normalised activations.
      tokens: about its tokens.
      cache: arrays of earlier tokens, to which these are appended; None = there are none.
    """
    q_BTNH = self._heads(self.q(x_BTD), self.q_norm)
    k_BTKH = self._heads(self.k(x_BTD), self.k_norm)
    v_BTKH = self._heads(self.v(x_BTD), None)
    if self.stretch != 1.0:
      q_BTNH = q_BTNH * self.stretch
    table = tokens.rope if self.window is None else tokens.window_rope
    q_BTNH, k_BTKH = rotate(q_BTNH, table), rotate(k_BTKH, table)
    more = {"soft_cap": self.model.attn_soft_cap, "sinks_N": self.sinks}
    width = self.model.head_dim
    if cache is None and kernel_for("attention", self.kernel, q_BTNH, width, width) == "triton":
      y_BTNH = attend_in_triton(q_BTNH, k_BTKH, v_BTKH, tokens, window=self.window, **more)
      return self.out(y_BTNH.flatten(2))
    if cache is not None:
      k_BTKH, v_BTKH = cache.extend((k_BTKH, v_BTKH), tokens)
    visible = visibility(tokens, cache, self.window)
    y_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, visible, scale=self.scale, **more)
    return self.out(y_BTNH.flatten(2))

  def _heads(self, flat_BTx: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is not None and self.all_heads:
      flat_BTx = norm(flat_BTx)
    x_BTNH = flat_BTx.unflatten(-1, (-1, self.model.head_dim))
    return x_BTNH if norm is None or self.all_heads else norm(x_BTNH)


class LatentAttention(nn.Module):
  """Self-attention whose keys and values are made of one narrow latent of a token (DeepSeek-V2).

  Of the H numbers of a query and of a key the last R carry the position; those of the key are the
  same for all heads. A cache keeps the latents.
  """

  def __init__(self, cfg: Settings):
    super().__init__()
    model = self.model = cfg.model
    stretch = model.attn_scale * model.head_dim**0.5 if model.attn_scale else 1.0
    self.stretch, self.scale = stretch, model.head_dim**-0.5
    self.kernel = asked_kernel(cfg, "attention")
    self.num_rotated = model.latent_rope_dim
    self.num_fixed = model.head_dim - model.latent_rope_dim
    queries, latent, heads = model.num_heads * model.head_dim, model.kv_latent_dim, model.num_heads
    norm = lambda width: RMSNorm(width, eps=LATENT_EPS, plus_one=model.norm_plus_one)
    self.q_down = Linear(model.d_model, model.q_latent_dim) if model.q_latent_dim else None
    self.q_norm = norm(model.q_latent_dim) if model.q_latent_dim else None
    self.q = Linear(model.q_latent_dim or model.d_model, queries)
    self.kv_down = Linear(model.d_model, latent + self.num_rotated)
    self.kv_norm = norm(latent)
    self.kv = Linear(latent, heads * (self.num_fixed + model.v_head_dim))
    self.out = Linear(heads * model.v_head_dim, model.d_model)

  def forward(self, x_BTD: Tensor, tokens: Tokens, cache: KeyCache | None = None) -> Tensor:
    """Attend to the tokens, and to those in the cache, from their latents."""
    narrow = x_BTD
    if self.q_down is not None and self.q_norm is not None:
      narrow = self.q_norm(self.q_down(x_BTD))
    q_BTNH = self.q(narrow).unflatten(-1, (-1, self.model.head_dim)) * self.stretch
    fixed_BTNx, turned_BTNR = q_BTNH.split([self.num_fixed, self.num_rotated], dim=-1)
    q_BTNH = torch.cat([fixed_BTNx, rotate(turned_BTNR, tokens.rope)], dim=-1)
    latent_BTC, part_BTR = self.kv_down(x_BTD).split(
      [self.model.kv_latent_dim, self.num_rotated], dim=-1
    )
    latent_BTC = self.kv_norm(latent_BTC)
    rotated_BTR = rotate(part_BTR[:, :, None], tokens.rope)[:, :, 0]
    if cache is not None:
      latent_BTC, rotated_BTR = cache.extend((latent_BTC, rotated_BTR), tokens)
    made_BSNx = self.kv(latent_BTC).unflatten(-1, (self.model.num_heads, -1))
    fixed_BSNx, v_BSNV = made_BSNx.split([self.num_fixed, self.model.v_head_dim], dim=-1)
    shared_BSNR = rotated_BTR[:, :, None].expand(*fixed_BSNx.shape[:3], self.num_rotated)
    k_BSNH = torch.cat([fixed_BSNx, shared_BSNR], dim=-1)
    widths = self.model.head_dim, self.model.v_head_dim
    if cache is None and kernel_for("attention", self.kernel, q_BTNH, *widths) == "triton":
      y_BTNV = attend_in_triton(q_BTNH, k_BSNH, v_BSNV, tokens, window=None)
      return self.out(y_BTNV.flatten(2))
    visible = visibility(tokens, cache, None)
    y_BTNV = attend(q_BTNH, k_BSNH, v_BSNV, visible, scale=self.scale)
    return self.out(y_BTNV.flatten(2))
