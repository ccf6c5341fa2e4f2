"""The decoder: embed, scan over blocks, norm, head. Letters: B batch, T seq, D d_model, V vocab."""

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import ModelConfig
from ats_jax.model.attention import KVCache
from ats_jax.model.block import Block
from ats_jax.model.init import Numerics, head_std, normal
from ats_jax.model.norm import RMSNorm
from ats_jax.ops import attention as attention_op
from ats_jax.ops.embedding import embedding_lookup
from ats_jax.ops.rope import rope_table
from ats_jax.sharding.apply import einsum, reshard

# What 'names' keeps beside attention's results: its inputs, and those of the MLP's second half.
SAVED_NAMES = ("attn_q", "attn_k", "attn_v", "mlp_gate", "mlp_up")


def remat_policy(name: str):
  """Return the `jax.checkpoint` policy called `name` in `step.remat` ('none' has no policy)."""
  policies = jax.checkpoint_policies
  attention = policies.save_only_these_names(*attention_op.SAVED_NAMES)
  dots = policies.dots_with_no_batch_dims_saveable
  return {
    "full": policies.nothing_saveable,
    "dots": policies.save_from_both_policies(dots, attention),
    "names": policies.save_only_these_names(*SAVED_NAMES, *attention_op.SAVED_NAMES),
  }[name]


class Decoder(nnx.Module):
  """A decoder-only transformer."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs):
    self.cfg, self.num = cfg, num
    shape = (cfg.vocab_size, cfg.d_model)
    table_std = head_std(cfg) if cfg.tie_embeddings else cfg.init_std
    self.embed = normal(
      rngs.params(), shape, ("vocab_rows", "table_embed"), table_std, num.param_dtype
    )
    # One Block whose every leaf has a leading [num_layers].
    self.blocks = jax.vmap(lambda r: Block(cfg, num, r))(rngs.split(cfg.num_layers))
    self.final_norm = RMSNorm(cfg.d_model, cfg.norm_eps, num)
    self.head = (
      None
      if cfg.tie_embeddings
      else normal(rngs.params(), shape, ("vocab", "embed"), head_std(cfg), num.param_dtype)
    )

  def __call__(
    self,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Run the stack; `logits` or the loss op turns the result into scores.

    Args:
      tokens_BT: int32 [batch, seq].
      positions_BT: int32, for RoPE; restart at 0 in each segment.
      segment_ids_BT: int32; tokens of different segments do not see each other.
      dropout_key: key of this micro-batch; None = no dropout.

    Returns:
      Final normalised activations [batch, seq, d_model] in the compute dtype.
    """
    table = rope_table(positions_BT, self.cfg.head_dim, self.cfg.rope_theta)

    def layer(x_BTD, block_and_index):
      block, index = block_and_index
      key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
      return block(x_BTD, table, segment_ids_BT=segment_ids_BT, dropout_key=key)

    if self.num.remat != "none":
      layer = jax.checkpoint(
        layer, policy=remat_policy(self.num.remat), prevent_cse=self.num.scan_unroll > 1
      )
    layers = (self.blocks, jnp.arange(self.cfg.num_layers))
    x_BTD, _ = jax.lax.scan(layer, self._lookup(tokens_BT), layers, unroll=self.num.scan_unroll)
    return self.final_norm(x_BTD)

  def extend(
    self, tokens_BT: jax.Array, index_BT: jax.Array, cache: KVCache
  ) -> tuple[jax.Array, KVCache]:
    """Run `tokens_BT` as the continuation of what the cache holds.

    Args:
      tokens_BT: int32 [batch, seq].
      index_BT: the cache slot, and position, of each token.
      cache: from `empty_cache`; slots beyond a token's own are not read.

    Returns:
      Final activations [batch, seq, d_model] and the extended cache.
    """
    table = rope_table(index_BT, self.cfg.head_dim, self.cfg.rope_theta)

    def layer(x_BTD, block_and_cache):
      block, layer_cache = block_and_cache
      return block(x_BTD, table, cache=layer_cache, index_BT=index_BT)

    x_BTD, cache = jax.lax.scan(layer, self._lookup(tokens_BT), (self.blocks, cache))
    return self.final_norm(x_BTD), cache

  def head_weights(self) -> jax.Array:
    """The output matrix [vocab, d_model] in the compute dtype."""
    weights = self.embed if self.head is None else self.head
    return reshard(weights[...].astype(self.num.compute_dtype), "vocab", "act_embed")

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """Scores [batch, seq, vocab] in float32; training uses ops.cross_entropy instead."""
    return einsum(
      "BTD,VD->BTV",
      x_BTD,
      self.head_weights(),
      axes=("batch", "seq", "vocab"),
      preferred_element_type=jnp.float32,
    )

  def _lookup(self, tokens_BT: jax.Array) -> jax.Array:
    num = self.num
    return embedding_lookup(
      self.embed[...], tokens_BT, num.compute_dtype, deterministic=num.deterministic
    )
