"""One pre-norm residual block."""

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import ModelConfig
from ats_jax.model.attention import Attention, KVCache, RopeTable
from ats_jax.model.init import Numerics
from ats_jax.model.mlp import MLP
from ats_jax.model.norm import RMSNorm


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zero each element with probability `rate` and scale the rest; no-op without a key."""
  if key is None or rate == 0.0:
    return x
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape, out_sharding=jax.typeof(x).sharding.spec)
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


class Block(nnx.Module):
  """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs):
    self.rate = cfg.dropout
    self.attn_norm = RMSNorm(cfg.d_model, cfg.norm_eps, num)
    self.attn = Attention(cfg, num, rngs)
    self.mlp_norm = RMSNorm(cfg.d_model, cfg.norm_eps, num)
    self.mlp = MLP(cfg, num, rngs)

  def __call__(
    self,
    x_BTD: jax.Array,
    table: RopeTable,
    *,
    segment_ids_BT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    cache: KVCache | None = None,
    index_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Map [batch, seq, d_model] to the same shape, and extend the cache if there is one."""
    attn_key, mlp_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    y_BTD, cache = self.attn(
      self.attn_norm(x_BTD), table, segment_ids_BT=segment_ids_BT, cache=cache, index_BT=index_BT
    )
    x_BTD = x_BTD + dropout(y_BTD, self.rate, attn_key)
    return x_BTD + dropout(self.mlp(self.mlp_norm(x_BTD)), self.rate, mlp_key), cache
