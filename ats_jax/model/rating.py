"""The head of a model that rates texts: a matrix of one row in place of that of the vocabulary.

Letters: B batch, T seq, D d_model, R ratings (one).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model.layers import Head
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Role, head_std
from ats_jax.model.random import Purpose, fold
from ats_jax.sharding.apply import einsum, ensure_sharding, reshard, row_axis


def with_rating_head(cfg: Config, num: Numerics, model: Any, key: jax.Array) -> Any:
  """The same model with a new head that rates.

  Args:
    cfg: the resolved config.
    num: dtypes and implementations.
    model: a model that predicts tokens.
    key: the root key of the run.
  """
  sizes = {"rating": 1, "embed": cfg.model.d_model}
  rngs = nnx.Rngs(params=fold(key, Purpose.RATING))
  model = jax.tree.map(lambda x: x, model)  # a copy
  head = Head(sizes, role=Role.HEAD, std=head_std(cfg.model), num=num, rngs=rngs)
  model.head = nnx.data(head)  # where the embedding was the head, it was no part of the tree
  return model


def ratings(model: Any, x_BTD: jax.Array) -> jax.Array:
  """The rating of each text as far as it goes at each position, float32 [batch, seq].

  Args:
    model: the result of `with_rating_head`.
    x_BTD: its final activations.
  """
  head_RD = reshard(model.head.value(jnp.dtype(jnp.float32)), "rating", "act_embed")
  axes = row_axis(x_BTD.shape[0]), "seq"
  x_BTD = ensure_sharding(x_BTD, *axes, "act_embed").astype(jnp.float32)
  exact = jax.lax.Precision.HIGHEST
  return einsum("BTD,RD->BTR", x_BTD, head_RD, axes=(*axes, "rating"), precision=exact)[..., 0]
