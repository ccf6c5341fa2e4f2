"""From a router's logits to each token's experts and their weights.

Letters: B batch, T seq, E columns of the router (experts, then null experts), K choices.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_shards, num_shards, reshard

TINY = 1e-20  # no division by 0 where all scores vanish


class RoutingRule(NamedTuple):
  """How scores become the weights of the chosen experts. Static.

  Attributes:
    top_k: choices of a token.
    score: "softmax" or "sigmoid" of the logits.
    renormalize: divide the weights by their sum.
    scale: multiply them by this.
  """

  top_k: int
  score: str
  renormalize: bool
  scale: float


def route(
  logits_BTE: jax.Array,
  selection_BTE: jax.Array,
  valid_BT: jax.Array,
  rule: RoutingRule,
  kernels: Kernels = XLA,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Choose the `top_k` columns highest in `selection`; weigh them by the scores of `logits`.

  Args:
    logits_BTE: float32 [batch, seq, columns], not sharded along the columns.
    selection_BTE: the values that are ranked, the lower column first among equals; no gradient.
    valid_BT: bool; other tokens are not counted.
    rule: how scores become weights.
    kernels: the chosen implementations.

  Returns:
    Columns [batch, seq, top_k] int32, of the invalid tokens too; their weights like the logits; and
    how many choices of valid tokens fell on each column of each row, [batch, columns] like the
    logits.
  """
  return _route(logits_BTE, jax.lax.stop_gradient(selection_BTE), valid_BT, rule, kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _route(logits_BTE, selection_BTE, valid_BT, rule, kernels):
  kernel = registry.kernel("routing", "forward", kernels, **_dims(logits_BTE, rule))
  if kernel is not None:
    run = functools.partial(kernel, **rule._asdict())
    args = logits_BTE, selection_BTE, valid_BT
    if num_shards("seq") == 1:
      column_BTK, weight_BTK, load_BE = map_shards(run, *args, out_like=(0, 0, 2))
      return column_BTK, weight_BTK, reshard(load_BE, "batch", "router")
    # The load that the kernel finds is of a device's part of each row.
    column_BTK, weight_BTK = map_shards(lambda *a: run(*a)[:2], *args, out_like=(0, 0))
    return column_BTK, weight_BTK, _load(_one_hot(column_BTK, logits_BTE), valid_BT, logits_BTE)
  column_BTK = jax.lax.top_k(selection_BTE, rule.top_k)[1]
  is_chosen_BTKE = _one_hot(column_BTK, logits_BTE)
  weight_BTK = jnp.sum(is_chosen_BTKE * _scores(logits_BTE, rule)[:, :, None], axis=-1)
  if rule.renormalize:
    weight_BTK /= jnp.sum(weight_BTK, axis=-1, keepdims=True) + TINY
  load_BE = _load(is_chosen_BTKE, valid_BT, logits_BTE)
  return column_BTK, rule.scale * weight_BTK, load_BE


def _forward(logits_BTE, selection_BTE, valid_BT, rule, kernels):
  out = _route(logits_BTE, selection_BTE, valid_BT, rule, kernels)
  return out, (logits_BTE, out[0])


def _backward(rule, kernels, residuals, cotangents):
  logits_BTE, column_BTK = residuals
  dweight_BTK = cotangents[1]
  kernel = registry.kernel("routing", "backward", kernels, **_dims(logits_BTE, rule))
  if kernel is not None:
    run = lambda *a: (kernel(*a, **rule._asdict()),)
    (dlogits_BTE,) = map_shards(run, logits_BTE, column_BTK, dweight_BTK, out_like=(0,))
    return dlogits_BTE, None, None
  scores_BTE, is_chosen_BTKE = _scores(logits_BTE, rule), _one_hot(column_BTK, logits_BTE)
  dchosen_BTK = rule.scale * dweight_BTK
  if rule.renormalize:
    chosen_BTK = jnp.sum(is_chosen_BTKE * scores_BTE[:, :, None], axis=-1)
    total_BT1 = jnp.sum(chosen_BTK, axis=-1, keepdims=True) + TINY
    mean_BT1 = jnp.sum(dchosen_BTK * chosen_BTK, axis=-1, keepdims=True) / total_BT1
    dchosen_BTK = (dchosen_BTK - mean_BT1) / total_BT1
  dscores_BTE = jnp.sum(is_chosen_BTKE * dchosen_BTK[..., None], axis=2)
  if rule.score == "softmax":
    dscores_BTE -= jnp.sum(dscores_BTE * scores_BTE, axis=-1, keepdims=True)
    return scores_BTE * dscores_BTE, None, None
  return scores_BTE * (1 - scores_BTE) * dscores_BTE, None, None


_route.defvjp(_forward, _backward)


def _load(is_chosen_BTKE, valid_BT, logits_BTE):
  """Choices of valid tokens by row and column."""
  # No matmul: where the positions are cut, one would have to be told how its result lies.
  counted_BTKE = is_chosen_BTKE & valid_BT[..., None, None]
  return jnp.sum(counted_BTKE, axis=(1, 2), dtype=logits_BTE.dtype)


def _scores(logits_BTE, rule):
  return jax.nn.softmax(logits_BTE) if rule.score == "softmax" else jax.nn.sigmoid(logits_BTE)


def _one_hot(column_BTK, logits_BTE):
  return column_BTK[..., None] == jnp.arange(logits_BTE.shape[-1])


def _dims(logits_BTE, rule):
  batch, seq, columns = logits_BTE.shape
  return dict(rows=batch * seq, columns=columns, top_k=rule.top_k)
