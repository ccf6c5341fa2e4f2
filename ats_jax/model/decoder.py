"""The decoder: embed, scan over super-blocks, norm, head.

Letters: B batch, T seq, D d_model, V vocab, L layers that skip tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model import moe
from ats_jax.model.block import Block, LayerCache, tokens_at
from ats_jax.model.fp8 import fp8_layers
from ats_jax.model.layer_kinds import LayerKind
from ats_jax.model.layers import RMSNorm, Weight
from ats_jax.model.layout import Segment, check_stages, segments_of
from ats_jax.model.mod import Pass
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Buffer, Role, head_std, is_variable
from ats_jax.model.stats import StackStats
from ats_jax.model.unroll import run_layers, scan_runs, taken_again, unstack
from ats_jax.ops import fp8_matmul, linear
from ats_jax.ops.attention import causal
from ats_jax.ops.embedding import embedding_lookup
from ats_jax.sharding.apply import einsum, is_shared, lay, num_shards, reshard
from ats_jax.sharding.pipeline import layer_at, most_micro_batches, num_stages, pipeline, row_axis
from ats_jax.sharding.rules import spec

# For each segment, for each place of its super-block: caches with a leading [repeats].
Cache = tuple[tuple[LayerCache, ...], ...]

# Results of kernels: 'dots' and 'names' keep them, so that none runs twice.
KERNEL_NAMES = (*causal.SAVED_NAMES, *moe.SAVED_NAMES, *fp8_matmul.SAVED_NAMES)
# What 'names' keeps beside them: attention's inputs, and those of the MLP's second half.
SAVED_NAMES = (*causal.INPUT_NAMES, "mlp_gate", "mlp_up")


def remat_policy(name: str):
  """Return the `jax.checkpoint` policy of this name in `step.remat`, of which 'none' has none."""
  policies = jax.checkpoint_policies
  products = policies.save_only_these_names(*KERNEL_NAMES, *linear.SAVED_NAMES)
  dots = policies.dots_with_no_batch_dims_saveable
  of_attention = *causal.SAVED_NAMES, *fp8_matmul.SAVED_NAMES
  whole = *causal.INPUT_NAMES, *of_attention, causal.OUTPUT_NAME
  return {
    "full": policies.nothing_saveable,
    "dots": policies.save_from_both_policies(dots, products),
    "names": policies.save_only_these_names(*SAVED_NAMES, *KERNEL_NAMES),
    "qkv": policies.save_only_these_names(*whole),
    "attention": policies.save_only_these_names(*of_attention),
  }[name]


class SuperBlock(nnx.Module):
  """The layers of one period of the pattern of dense and sparse layers."""

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs, kinds: tuple[LayerKind, ...]):
    self.layers = nnx.List([Block(cfg, num, rngs, kind) for kind in kinds])


class Decoder(nnx.Module):
  """A decoder-only transformer: a list of segments, each scanned over its super-blocks."""

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs):
    model = cfg.model
    self.cfg, self.num = model, num
    check_stages(cfg, num_stages())
    self.layout, self.fp8 = segments_of(cfg), fp8_layers(cfg)
    std = head_std(model) if model.tie_embeddings else model.init_std
    sizes = {"vocab": model.vocab_size, "embed": model.d_model}
    self.embed = Weight(sizes, role=Role.EMBEDDING, std=std, num=num, rngs=rngs)
    # Each a SuperBlock whose every leaf has a leading [repeats].
    self.segments = nnx.List(
      [
        _stack(lambda r, kinds=s.kinds: SuperBlock(cfg, num, r, kinds), of_segment)
        for s, of_segment in zip(self.layout, self._split(rngs), strict=True)
      ]
    )
    self.final_norm = RMSNorm(model.d_model, model, num)
    self.head = (
      None
      if model.tie_embeddings
      else Weight(sizes, role=Role.HEAD, std=head_std(model), num=num, rngs=rngs)
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
      tokens_BT: int32 [batch, seq]; with a pipeline all micro-batches of a step (`join`).
      positions_BT: int32, for RoPE; restart at 0 in each segment.
      segment_ids_BT: int32; tokens of different segments do not see each other; 0 = padding.
      rules: how sparse layers choose.
      key: of this micro-batch, for dropout, noise and random routing; None = none of them. With a
        pipeline it is folded with the number of the micro-batch here.

    Returns:
      Final normalised activations [batch, seq, d_model] in the compute dtype, positions cut as
      "residual_seq", and statistics of the sparse layers.
    """
    tokens_BT, positions_BT, segment_ids_BT = (
      reshard(a, row_axis(a.shape[0]), "seq") for a in (tokens_BT, positions_BT, segment_ids_BT)
    )
    skips = any(kind.mod for segment in self.layout for kind in segment.kinds)
    of_stream = row_axis(tokens_BT.shape[0]), "residual_seq"
    depth_BT = lay(jnp.zeros_like(segment_ids_BT), *of_stream) if skips else None
    x_BTD = lay(self._lookup(tokens_BT), *of_stream, "act_embed")
    carry, beside = (x_BTD, depth_BT), (positions_BT, segment_ids_BT)
    run = functools.partial(self._run, rules=rules)
    firsts = [segment.layer_indices(0) for segment in self.layout]
    stacks = list(zip(self.segments, firsts, strict=True))
    if num_stages() == 1:
      stats = []
      for segment, stack in zip(self.layout, stacks, strict=True):
        carry, of_segment = run(stack, carry, beside, key, segment=segment)
        stats.append(of_segment)
    else:
      rows, rounds = tokens_BT.shape[0], [(blocks, jnp.array(firsts)) for blocks, firsts in stacks]
      micro = self.num.micro_batches if rules.training else most_micro_batches(rows)
      stage = functools.partial(run, segment=self.layout[0])
      policy = remat_policy(self.num.remat_stages)
      carry, stats = pipeline(stage, rounds, carry, beside, key, micro=micro, policy=policy)
    x_BTD, depth_BT = carry
    x_BTD, valid_BT = self.final_norm(x_BTD), lay(segment_ids_BT, *of_stream) > 0
    return x_BTD, StackStats(tuple(stats), self._depth_counts(depth_BT, valid_BT))

  def _run(
    self,
    stack: Any,
    carry: Any,
    beside: Any,
    key: jax.Array | None,
    *,
    segment: Segment,
    rules: Pass,
  ) -> tuple[Any, Any]:
    """Run layers of a segment, all of them or those of one stage.

    Args:
      stack: their super-blocks, and the index of the first layer of each of them.
      carry: activations, and how many layers each token went through that skip some (None: there
        are none).
      beside: positions and segment ids.
      key: of this micro-batch.
      segment: whose layers they are. All rounds of a pipeline are alike: any of them.
      rules: of this pass.

    Returns:
      The carry behind them, and their statistics.
    """
    tokens, (blocks, firsts) = tokens_at(self.cfg, *beside), stack

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

    def from_stack(fp8, blocks, carry, layer):
      block, index, first = layer
      return super_block(fp8, carry, (taken_again(block, blocks, index), first))

    unroll, repeats = self.num.scan_unroll, len(firsts)
    is_unrolled = unroll > 1 and unroll >= repeats
    again = is_unrolled and self._gathers_again()
    of_layer = from_stack if again else super_block
    remat = functools.partial(self._remat, in_loop=unroll == 1, from_stack=again)
    # One function for each choice of formats: what is traced once serves all repeats.
    body_of = functools.cache(lambda fp8: remat(functools.partial(of_layer, fp8)))
    # All stages have the same formats in the same places (`check_stages`).
    places = segment.layer_indices(0)[:repeats]
    bodies = [body_of(self._formats(place, len(segment.kinds), rules)) for place in places]
    if not is_unrolled:
      return scan_runs(bodies, carry, (blocks, jnp.array(firsts)), unroll)
    layers = [unstack(blocks), firsts]
    if again:
      layers.insert(1, range(repeats))
      bodies = [functools.partial(body, blocks) for body in bodies]
    return run_layers(bodies, carry, zip(*layers, strict=True), in_order=is_shared())

  def _split(self, rngs: nnx.Rngs) -> list[nnx.Rngs]:
    """Keys for the super-blocks of each segment; rounds of a pipeline take those of one stack."""
    if num_stages() == 1:
      return [rngs.split(segment.repeats) for segment in self.layout]
    number = self.layout[0].repeats
    every = rngs.split(number * len(self.layout))
    part = lambda n: jax.tree.map(lambda a: a[n * number : (n + 1) * number], every)
    return [part(n) for n in range(len(self.layout))]

  def _formats(self, first: int, number: int, rules: Pass) -> tuple[bool, ...]:
    """Which of `number` layers from `first` on are multiplied in 8 bits in this pass."""
    return tuple(fp8 and rules.fp8 for fp8 in self.fp8[first : first + number])

  def _gathers_again(self) -> bool:
    """Whether the backward pass gathers the weights of a layer that it computes again."""
    is_gathered = num_shards("embed") > 1 and not self.num.keep_gathered
    return is_gathered and self.num.remat != "none"

  def _remat(self, super_block: Callable, *, in_loop: bool, from_stack: bool) -> Callable:
    """`super_block` under the policy of `step.remat`; a loop needs no barrier against CSE."""
    if self.num.remat == "none":
      return super_block
    # Only gathered weights get a barrier, so that they are not kept; others are resident anyway.
    # Of those that are taken from the stack the index has it.
    # A prefix of the arguments' tree: jax accepts it, its type annotation does not.
    barriers: Any = False if in_loop else (True, (self._gathers_again(), True))
    if from_stack:
      barriers = False, True, (False, True, True)
    if not in_loop and num_stages() > 1 and self.num.remat_stages != "full":
      barriers = True  # jax cannot cut a tree of them where a policy around it keeps some results
    return jax.checkpoint(super_block, policy=remat_policy(self.num.remat), prevent_cse=barriers)

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

    Not in 8 bits: a token is fewer rows than they take, and a prompt is not worth tuning for them.
    Where rows are cut along their positions, use it under `whole_rows()`: one position is no row.

    Args:
      tokens_BT: int32 [batch, seq].
      index_BT: the cache slot, and position, of each token.
      valid_BT: bool; padding takes no place in a sparse layer.
      cache: from `empty_cache`; slots beyond a token's own are not read.
      rules: of evaluation.

    Returns:
      Final activations [batch, seq, d_model] and the extended cache.
    """
    assert not rules.training
    tokens = tokens_at(self.cfg, index_BT, valid_BT.astype(jnp.int32), index_BT)

    def super_block(blocks, x_BTD, inputs):
      block, first, caches = inputs
      if num_stages() > 1:  # one token is no pipeline: the weights come to it
        block = layer_at(blocks, block)
      extended = []
      for place, layer in enumerate(block.layers):
        x_BTD, _, _, new = layer(x_BTD, tokens, rules, layer=first + place, cache=caches[place])
        extended.append(new)
      return x_BTD, tuple(extended)

    x_BTD, new_cache = reshard(self._lookup(tokens_BT), "batch", "residual_seq", "act_embed"), []
    for segment, blocks, caches in zip(self.layout, self.segments, cache, strict=True):
      firsts = jnp.array(segment.layer_indices(0))
      given = jnp.arange(segment.repeats) if num_stages() > 1 else blocks
      body = functools.partial(super_block, blocks)
      x_BTD, extended = jax.lax.scan(body, x_BTD, (given, firsts, caches))
      new_cache.append(extended)
    return self.final_norm(x_BTD), tuple(new_cache)

  def empty_cache(self, batch: int, length: int, rules: Pass, dtype: jnp.dtype) -> Cache:
    """A cache for rows of up to `length` tokens.

    A layer that whole blocks skip keeps only as many keys and values as it has places.
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
    """The output matrix [vocab, d_model] in the compute dtype, cut as it is kept."""
    layer = self.embed if self.head is None else self.head
    return layer.value(self.num.compute_dtype)

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """Scores [batch, seq, vocab] in float32; training uses ops.cross_entropy instead."""
    logits_BTV = einsum(
      "BTD,VD->BTV",
      lay(x_BTD, "batch", "seq", "act_embed"),
      reshard(self.head_weights(), "vocab", "act_embed"),
      axes=("batch", "seq", "vocab"),
      preferred_element_type=jnp.float32,
    )
    cap = self.cfg.logit_soft_cap
    return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV

  def _lookup(self, tokens_BT: jax.Array) -> jax.Array:
    num, table_VD = self.num, self.embed.value()  # the lookup casts single rows
    x_BTD = embedding_lookup(
      table_VD, tokens_BT, num.compute_dtype, deterministic=num.deterministic
    )
    if not self.cfg.scale_embeddings:
      return x_BTD
    return x_BTD * jnp.asarray(self.cfg.d_model**0.5, x_BTD.dtype)


def _stack(make: Callable[[nnx.Rngs], SuperBlock], rngs: nnx.Rngs) -> SuperBlock:
  """A super-block for each key, stacked; each stage of a pipeline draws the weights of its own."""
  if num_stages() == 1:
    return jax.vmap(make)(rngs)
  blocks = jax.vmap(make)(jax.tree.map(lambda a: reshard(a, "layers"), rngs))
  # Buffers are small, and the step sets those of all layers at a time.
  whole = lambda v: jax.tree.map(lambda a: reshard(a, None, *v.axes), v)
  set_whole = lambda v: whole(v) if isinstance(v, Buffer) else v
  return jax.tree.map(set_whole, blocks, is_leaf=is_variable)
