"""The decoder: embed, layers, norm, head. Letters: B batch, T seq, D d_model, V vocab."""

import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ats_jax.pytorch.attention import Attention, KeyCache, LatentAttention, Tokens, runs_of
from ats_jax.pytorch.kernels import has_triton
from ats_jax.pytorch.layers import MLP, Linear, Rope, norm_of
from ats_jax.pytorch.mod import Depth, MoDStats
from ats_jax.pytorch.moe import MoE, MoEStats
from ats_jax.pytorch.settings import (
  LayerKind,
  RoutingRules,
  Settings,
  check,
  evaluation_rules,
  layer_kinds,
)


class LayerStats(NamedTuple):
  """Of one layer; None for what it has not."""

  moe: MoEStats | None
  mod: MoDStats | None


@dataclasses.dataclass
class LayerCache:
  """What generation remembers of a layer.

  Attributes:
    keys: arrays of the tokens that attention has seen.
    taken_B: how many tokens went through a layer that skips some.
  """

  keys: KeyCache = dataclasses.field(default_factory=KeyCache)
  taken_B: Tensor | int = 0


@dataclasses.dataclass
class Cache:
  """What generation remembers of the tokens so far; it grows with them.

  Attributes:
    layers: from the bottom up.
    order: numbers of the tokens in their rows, as in a layer that all tokens go through.
    length: tokens of a row so far, padding among them.
  """

  layers: list[LayerCache]
  order: KeyCache = dataclasses.field(default_factory=KeyCache)
  length: int = 0

  def get_seq_length(self) -> int:
    """`length`, as `transformers` asks for it."""
    return self.length


class Block(nn.Module):
  """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`; of all tokens or some."""

  def __init__(self, cfg: Settings, kind: LayerKind, layer: int):
    super().__init__()
    self.scope, self.dropout = cfg.mod.scope, nn.Dropout(cfg.model.dropout)
    post = cfg.model.post_norms
    norm = lambda: norm_of(cfg, cfg.model.d_model)
    self.attn_norm = norm()
    if cfg.model.kv_latent_dim:
      self.attn = LatentAttention(cfg)
    else:
      self.attn = Attention(cfg, window=cfg.model.window if kind.window else None)
    self.attn_post_norm = norm() if post else None
    self.mlp_norm = norm()
    self.mlp = MoE(cfg) if kind.moe else MLP(cfg, cfg.model.d_ff)
    self.mlp_post_norm = norm() if post else None
    self.depth = Depth(cfg, layer) if kind.mod else None

  def forward(
    self,
    x_BTD: Tensor,
    tokens: Tokens,
    rules: RoutingRules,
    cache: LayerCache | None = None,
    total: int = 0,
    rope: "Ropes | None" = None,
  ) -> tuple[Tensor, LayerStats, Tensor | None]:
    """Map [batch, seq, d_model] to the same shape.

    Args:
      x_BTD: the residual stream.
      tokens: about its tokens.
      rules: how sparse layers choose.
      cache: arrays of earlier tokens, to which these are appended; None = there are none.
      total: tokens of a row with those of the cache.
      rope: for the tokens that are chosen; a layer for all tokens needs none.

    Returns:
      The stream, statistics, and which tokens went through (None = all).
    """
    if self.depth is not None:
      assert rope is not None
      return self._for_some(self.depth, x_BTD, tokens, rules, cache, total, rope)
    x_BTD = x_BTD + self._attend(x_BTD, tokens, None if cache is None else cache.keys)
    y_BTD, moe = self._feed(x_BTD, tokens, rules)
    return x_BTD + y_BTD, LayerStats(moe, None), None

  def _for_some(
    self,
    depth: Depth,
    x_BTD: Tensor,
    tokens: Tokens,
    rules: RoutingRules,
    cache: LayerCache | None,
    total: int,
    rope: "Ropes",
  ) -> tuple[Tensor, LayerStats, Tensor]:
    """Only the tokens that `depth` chooses go through the block, or through its feed-forward."""
    keys = None if cache is None else cache.keys
    if self.scope == "ffn":
      x_BTD = x_BTD + self._attend(x_BTD, tokens, keys)
    seq, valid_BT = x_BTD.shape[1], tokens.segment_ids_BT > 0
    places, room_B = rules.places(seq), None
    if cache is not None:
      in_all = rules.places(total)
      places = min(seq, in_all)
      room_B = torch.full((len(x_BTD),), in_all, device=x_BTD.device) - cache.taken_B
    chosen, mod = depth(x_BTD, tokens.positions_BT, valid_BT, rules, places=places, room_B=room_B)
    if cache is not None:
      cache.taken_B = cache.taken_B + chosen.passed_BT.sum(dim=1)
      if not chosen.passed_BT.any():  # often none of the few tokens at hand goes through
        return x_BTD, LayerStats(None, mod), chosen.passed_BT
    segment_ids_BC = chosen.take_ids(tokens.segment_ids_BT)
    order_BC = torch.arange(places, device=x_BTD.device).expand_as(segment_ids_BC)
    if keys is not None and self.scope == "block":
      order_BC = keys.order_of(segment_ids_BC)
    positions_BC = chosen.take_ids(tokens.positions_BT)
    some = rope.tokens(positions_BC, segment_ids_BC, order_BC, cached=keys is not None)
    x_BCD = chosen.take(x_BTD)
    if self.scope == "ffn":
      y_BCD, moe = self._feed(x_BCD, some, rules)
    else:
      attended_BCD = self._attend(x_BCD, some, keys)
      y_BCD, moe = self._feed(x_BCD + attended_BCD, some, rules)
      y_BCD = y_BCD + attended_BCD
    return x_BTD + chosen.put(y_BCD), LayerStats(moe, mod), chosen.passed_BT

  def _attend(self, x_BTD: Tensor, tokens: Tokens, keys: KeyCache | None) -> Tensor:
    y_BTD = self.attn(self.attn_norm(x_BTD), tokens, keys)
    if self.attn_post_norm is not None:
      y_BTD = self.attn_post_norm(y_BTD)
    return self.dropout(y_BTD)

  def _feed(
    self, x_BTD: Tensor, tokens: Tokens, rules: RoutingRules
  ) -> tuple[Tensor, MoEStats | None]:
    x_BTD, moe = self.mlp_norm(x_BTD), None
    if isinstance(self.mlp, MoE):
      y_BTD, moe = self.mlp(x_BTD, tokens.segment_ids_BT > 0, training=rules.training)
    else:
      y_BTD = self.mlp(x_BTD)
    if self.mlp_post_norm is not None:
      y_BTD = self.mlp_post_norm(y_BTD)
    return self.dropout(y_BTD), moe


class Ropes(nn.Module):
  """The rotary tables of a model: of all layers, and of those with a window."""

  def __init__(self, model: Settings):
    super().__init__()
    self.usual = Rope(model, theta=model.rope_theta, scaled=True)
    own = model.window_rope_theta
    self.of_windows = Rope(model, theta=own, scaled=False) if own else None

  def tokens(
    self,
    positions_BT: Tensor,
    segment_ids_BT: Tensor,
    order_BT: Tensor,
    *,
    cached: bool,
    alone: bool = False,
  ) -> Tokens:
    """`Tokens` with the tables of their positions; `cached`: there are earlier ones in a cache."""
    table = self.usual(positions_BT)
    other = table if self.of_windows is None else self.of_windows(positions_BT)
    reads_runs = has_triton(segment_ids_BT.device) and not cached
    runs = runs_of(segment_ids_BT) if reads_runs else None
    return Tokens(positions_BT, segment_ids_BT, order_BT, table, other, alone and not cached, runs)


class Decoder(nn.Module):
  """A decoder-only transformer: the function of `ats_jax.model.decoder`.

  Its weights are zeros and ones at first: they come from JAX (`weights`), or from a file.
  """

  def __init__(self, cfg: Settings, dtype: torch.dtype | None = None, *, remat: bool = False):
    """Make the layers.

    Args:
      cfg: a resolved config, or its sections `model`, `moe`, `mod` and `data`.
      dtype: of activations, and of what they are multiplied with; None = that of the table.
      remat: compute layers again in the backward pass, and keep only what goes in.

    Raises:
      ValueError: for a model that PyTorch does not compute here.
    """
    super().__init__()
    check(cfg)
    self.cfg, self.remat, model = cfg, remat, cfg.model
    self._dtype = dtype
    self.kinds = layer_kinds(cfg)
    self.embed = nn.Embedding(model.vocab_size, model.d_model)
    self.layers = nn.ModuleList(Block(cfg, kind, i) for i, kind in enumerate(self.kinds))
    self.final_norm = norm_of(cfg, model.d_model)
    tied = model.tie_embeddings
    self.head = None if tied else Linear(model.d_model, model.vocab_size)
    self.rope = Ropes(model)

  @property
  def dtype(self) -> torch.dtype:
    """Of activations."""
    return self._dtype or self.embed.weight.dtype

  def forward(
    self,
    tokens_BT: Tensor,
    *,
    positions_BT: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    rules: RoutingRules | None = None,
    cache: Cache | None = None,
  ) -> tuple[Tensor, list[LayerStats], Tensor | None]:
    """Run the layers; `logits` turns the result into scores.

    Args:
      tokens_BT: int [batch, seq].
      positions_BT: for RoPE, from 0 in each segment; None = one document a row.
      segment_ids_BT: tokens of different segments do not see each other; 0 = padding, which comes
        first where there is a cache. None = one document a row.
      rules: how sparse layers choose; None = those of evaluation.
      cache: arrays of earlier tokens (`empty_cache`), to which these are appended.

    Returns:
      Final normalised activations [batch, seq, d_model]; statistics of each layer; how many of the
      skipping layers each token went through (None without any).
    """
    rules = evaluation_rules(self.cfg) if rules is None else rules
    assert cache is None or not rules.training
    alone, before = segment_ids_BT is None, 0 if cache is None else cache.length
    if segment_ids_BT is None:
      segment_ids_BT = torch.ones_like(tokens_BT)
    order_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    if cache is not None:
      order_BT = cache.order.order_of(segment_ids_BT)
      cache.length += tokens_BT.shape[1]
    if positions_BT is None:
      assert alone or cache is not None, "packed rows come with their positions"
      positions_BT = order_BT
    is_cached = cache is not None
    tokens = self.rope.tokens(positions_BT, segment_ids_BT, order_BT, cached=is_cached, alone=alone)
    x_BTD = F.embedding(tokens_BT, self.embed.weight).to(self.dtype)
    if self.cfg.model.scale_embeddings:
      x_BTD = x_BTD * torch.tensor(self.cfg.model.d_model**0.5, dtype=self.dtype).item()
    stats, depth_BT = [], None
    total = before + tokens_BT.shape[1]
    for number, layer in enumerate(self.layers):
      layer_cache = None if cache is None else cache.layers[number]
      run = functools.partial(checkpoint, layer, use_reentrant=False) if self.remat else layer
      x_BTD, of_layer, passed_BT = run(x_BTD, tokens, rules, layer_cache, total, self.rope)
      stats.append(of_layer)
      if passed_BT is not None:
        depth_BT = passed_BT.long() + (0 if depth_BT is None else depth_BT)
    return self.final_norm(x_BTD), stats, depth_BT

  def empty_cache(self) -> Cache:
    """A cache of no tokens."""
    return Cache([LayerCache() for _ in self.layers])

  def head_weights(self) -> Tensor:
    """The output matrix [vocab, d_model] in the dtype of activations."""
    return (self.embed if self.head is None else self.head).weight.to(self.dtype)

  def logits(self, x_BTD: Tensor) -> Tensor:
    """Scores [..., vocab] in float32."""
    return soft_capped(F.linear(x_BTD, self.head_weights()).float(), self.cfg.model.logit_soft_cap)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
  """`cap * tanh(logits / cap)`; 0 = they stay as they are."""
  return cap * torch.tanh(logits / cap) if cap else logits
