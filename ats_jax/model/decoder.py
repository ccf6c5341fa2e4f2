"""The decoder: embed, super-blocks, norm, head.

Letters: B batch, T seq, D d_model, V vocab, L layers that skip tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model.block import Block, LayerCache, tokens_at
from ats_jax.model.forward_pass import Pass
from ats_jax.model.fp8 import fp8_layers
from ats_jax.model.layer_kinds import LayerKind
from ats_jax.model.layers import Embedding, Head, RMSNorm
from ats_jax.model.layout import Segment, segments_of
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Role, head_std
from ats_jax.model.stack import Body, Layers
from ats_jax.model.stats import StackStats
from ats_jax.sharding.apply import einsum, ensure_sharding, reshard, row_axis
from ats_jax.sharding.rules import spec

# For each segment, for each place of its super-block: caches with a leading [repeats].
Cache = tuple[tuple[LayerCache, ...], ...]


class SuperBlock(nnx.Module):
  """The layers of one period of the pattern of dense and sparse layers."""

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs, kinds: tuple[LayerKind, ...]):
    self.layers = nnx.List([Block(cfg, num, rngs, kind) for kind in kinds])


class Decoder(nnx.Module):
  """A decoder-only transformer: a list of segments of stacked super-blocks.

  `Numerics.stack` draws the segments and runs them.
  """

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs):
    model = cfg.model
    self.cfg, self.num = model, num
    self.layout, self.fp8 = segments_of(cfg), fp8_layers(cfg)
    std = head_std(model) if model.tie_embeddings else model.embed_std or model.init_std
    sizes = {"vocab": model.vocab_size, "embed": model.d_model}
    self.embed = Embedding(sizes, std=std, num=num, rngs=rngs)
    makes = [lambda r, kinds=s.kinds: SuperBlock(cfg, num, r, kinds) for s in self.layout]
    # Each a SuperBlock whose every leaf has a leading [repeats].
    self.segments = nnx.List(num.stack.draw(makes, [s.repeats for s in self.layout], rngs))
    self.final_norm = RMSNorm(model.d_model, model, num)
    self.head = (
      None
      if model.tie_embeddings
      else Head(sizes, role=Role.HEAD, std=head_std(model), num=num, rngs=rngs)
    )

  def __call__(
    self,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
    rules: Pass,
    key: jax.Array | None = None,
  ) -> tuple[jax.Array, StackStats]:
    """Run the stack; `logits` or the loss op turns the result into scores.

    Args:
      tokens_BT: int32 [batch, seq]: a micro-batch, or all micro-batches joined by `Stack.join`.
      positions_BT: int32 positions for RoPE, which restart at 0 in each segment.
      segment_ids_BT: int32; tokens of different segments do not see each other; 0 = padding.
      rules: how sparse layers choose.
      key: the key of these rows, for dropout, noise and random routing; None = none of them.

    Returns:
      Final normalised activations [batch, seq, d_model] in the compute dtype, positions sharded
      as "seq", and statistics of the sparse layers.
    """
    tokens_BT, positions_BT, segment_ids_BT = (
      reshard(a, row_axis(a.shape[0]), "seq") for a in (tokens_BT, positions_BT, segment_ids_BT)
    )
    skips = any(kind.mod for segment in self.layout for kind in segment.kinds)
    stream_axes = row_axis(tokens_BT.shape[0]), "seq"
    depth_BT = ensure_sharding(jnp.zeros_like(segment_ids_BT), *stream_axes) if skips else None
    x_BTD = ensure_sharding(self.lookup(tokens_BT), *stream_axes, "act_embed")
    carry, side_inputs = (x_BTD, depth_BT), (positions_BT, segment_ids_BT)
    layers = [
      Layers(blocks, segment.layer_indices(0), self._formats(segment, rules))
      for segment, blocks in zip(self.layout, self.segments, strict=True)
    ]
    body_of = functools.partial(self._body, rules)
    carry, stats = self.num.stack.run(
      body_of, layers, carry, side_inputs, key, training=rules.training
    )
    x_BTD, depth_BT = carry
    x_BTD, valid_BT = self.final_norm(x_BTD), ensure_sharding(segment_ids_BT, *stream_axes) > 0
    return x_BTD, StackStats(tuple(stats), self._depth_counts(depth_BT, valid_BT))

  def _body(self, rules: Pass, side_inputs: Any, key: jax.Array | None) -> Body:
    """Make the function of one super-block.

    Args:
      rules: how sparse layers choose.
      side_inputs: positions_BT and segment_ids_BT.
      key: the key of this micro-batch, or None.

    Returns:
      A `Body`. Its carry holds the activations, and the number of token-skipping layers that each
      token went through (None if no layer skips tokens).
    """
    tokens = tokens_at(self.cfg, *side_inputs)

    def super_block(fp8, carry, block_and_index):
      (x_BTD, depth_BT), (block, first) = carry, block_and_index
      stats = []
      for place, layer in enumerate(block.layers):
        index = first + place
        layer_key = None if key is None else jax.random.fold_in(key, index)
        x_BTD, layer_stats, passed_BT, _ = layer(
          x_BTD, tokens, rules, layer=index, key=layer_key, fp8=fp8[place]
        )
        stats.append(layer_stats)
        if layer.depth is not None:
          depth_BT += passed_BT
      return (x_BTD, depth_BT), tuple(stats)

    return super_block

  def _formats(self, segment: Segment, rules: Pass) -> list[tuple[bool, ...]]:
    """For each super-block, tell which of its layers multiply in 8 bits in this pass."""
    number = len(segment.kinds)
    flags = lambda first: self.fp8[first : first + number]
    return [tuple(fp8 and rules.fp8 for fp8 in flags(n)) for n in segment.layer_indices(0)]

  def _depth_counts(self, depth_BT: jax.Array | None, valid_BT: jax.Array) -> jax.Array | None:
    if depth_BT is None:
      return None
    skipping = sum(kind.mod for s in self.layout for kind in s.kinds * s.repeats)
    is_depth_BTL = (depth_BT[..., None] == jnp.arange(skipping + 1)) & valid_BT[..., None]
    return jnp.sum(is_depth_BTL, axis=(0, 1), dtype=jnp.float32)

  def extend(
    self, tokens_BT: jax.Array, index_BT: jax.Array, valid_BT: jax.Array, cache: Cache, rules: Pass
  ) -> tuple[jax.Array, Cache]:
    """Run `tokens_BT` as the continuation of what the cache holds.

    It never multiplies in 8 bits: a single token has fewer rows than these kernels need. Where rows
    are sharded along their positions, call it under `whole_rows()`.

    Args:
      tokens_BT: int32 [batch, seq].
      index_BT: the cache slot, and position, of each token.
      valid_BT: bool; padding takes no place in a sparse layer.
      cache: from `empty_cache`; slots beyond a token's own are not read.
      rules: the rules of an evaluation pass.

    Returns:
      Final activations [batch, seq, d_model] and the extended cache.
    """
    assert not rules.training
    tokens = tokens_at(self.cfg, index_BT, valid_BT.astype(jnp.int32), index_BT)

    def super_block(x_BTD, block_and_inputs):
      block, (first, caches) = block_and_inputs
      extended = []
      for place, layer in enumerate(block.layers):
        x_BTD, _, _, new = layer(x_BTD, tokens, rules, layer=first + place, cache=caches[place])
        extended.append(new)
      return x_BTD, tuple(extended)

    x_BTD, new_cache = reshard(self.lookup(tokens_BT), "batch", "seq", "act_embed"), []
    for segment, blocks, caches in zip(self.layout, self.segments, cache, strict=True):
      firsts = jnp.array(segment.layer_indices(0))
      x_BTD, extended = self.num.stack.scan(super_block, blocks, x_BTD, (firsts, caches))
      new_cache.append(extended)
    return self.final_norm(x_BTD), tuple(new_cache)

  def largest_logits(
    self, tokens_BT: jax.Array, *, positions_BT: jax.Array, segment_ids_BT: jax.Array, rules: Pass
  ) -> jax.Array:
    """The largest logit of each layer's attention in a pass without 8 bits, float32 [layers].

    It is -inf in layers that some tokens skip. Arguments as of a call.
    """
    rows = row_axis(tokens_BT.shape[0])
    tokens_BT, *of_tokens = (
      reshard(a, rows, "seq") for a in (tokens_BT, positions_BT, segment_ids_BT)
    )
    tokens = tokens_at(self.cfg, *of_tokens)

    def super_block(x_BTD, block_and_first):
      block, first = block_and_first
      logits = []
      for place, layer in enumerate(block.layers):
        logits.append(layer.largest_logit(x_BTD, tokens))
        x_BTD, *_ = layer(x_BTD, tokens, rules, layer=first + place)
      return x_BTD, tuple(logits)

    x_BTD = ensure_sharding(self.lookup(tokens_BT), rows, "seq", "act_embed")
    logits, indices = list[jax.Array](), list[int]()
    for segment, blocks in zip(self.layout, self.segments, strict=True):
      firsts = jnp.array(segment.layer_indices(0))
      x_BTD, of_segment = self.num.stack.scan(super_block, blocks, x_BTD, firsts)
      for place, of_layers in enumerate(of_segment):
        logits.append(of_layers)
        indices += segment.layer_indices(place)
    return jnp.concatenate(logits)[jnp.argsort(jnp.array(indices))]

  def empty_cache(self, batch: int, length: int, rules: Pass, dtype: jnp.dtype) -> Cache:
    """Make an empty cache for rows of up to `length` tokens.

    With `mod.scope=block`, a layer that skips tokens gets only as many slots as it has places.
    """

    def layer_cache(block: Block, repeats: int) -> LayerCache:
      skipped = block.depth is not None and block.scope == "block"
      slots = rules.places(length) if skipped else length
      kv = block.attn.empty_cache((repeats, batch, slots), dtype)
      if block.depth is None:
        return LayerCache(kv, None)
      taken = jnp.zeros((repeats, batch), jnp.int32, out_sharding=spec(None, "batch"))
      return LayerCache(kv, taken)

    return tuple(
      tuple(layer_cache(block, segment.repeats) for block in blocks.layers)
      for segment, blocks in zip(self.layout, self.segments, strict=True)
    )

  def head_weights(self) -> jax.Array:
    """The output matrix [vocab, d_model] in the compute dtype, sharded as it is stored."""
    layer = self.embed if self.head is None else self.head
    return layer.value(self.num.compute_dtype)

  @property
  def predicts(self) -> bool:
    """Whether it predicts tokens: one that rates texts has another head."""
    return self.head is None or "vocab" in self.head.weight.axes

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """Scores [batch, seq, vocab] in float32; training uses ops.cross_entropy instead."""
    logits_BTV = einsum(
      "BTD,VD->BTV",
      ensure_sharding(x_BTD, "batch", "seq", "act_embed"),
      reshard(self.head_weights(), "vocab", "act_embed"),
      axes=("batch", "seq", "vocab"),
      preferred_element_type=jnp.float32,
    )
    cap = self.cfg.logit_soft_cap
    return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV

  def lookup(self, tokens_BT: jax.Array) -> jax.Array:
    """The rows [batch, seq, d_model] of the embedding, in the compute dtype."""
    x_BTD = self.embed.rows(tokens_BT)
    if not self.cfg.scale_embeddings:
      return x_BTD
    return x_BTD * jnp.asarray(self.cfg.d_model**0.5, x_BTD.dtype)


def with_head(cfg: Config, num: Numerics, model: Any, key: jax.Array) -> Any:
  """The model with the head that its loss needs, which is drawn from `key` if it is a new one."""
  if not cfg.step.loss.RATES:
    return model
  from ats_jax.model.rating import with_rating_head

  return with_rating_head(cfg, num, model, key)
