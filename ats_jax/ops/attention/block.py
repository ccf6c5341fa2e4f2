"""Attention of some queries to some keys of a row, with statistics to merge it with the rest.

The softmax is over these keys alone; `merge_attention` combines several such blocks. The versions
here are XLA's, and the specification of the slots `attention_block.forward` and
`attention_block.backward`.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, H head_dim,
V width of a value.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenPositions(NamedTuple):
  """Where queries or keys are in their rows.

  Attributes:
    ids_BT: int32 segment ids; in a whole row each id is one contiguous run.
    at_BT: int32 positions in the row.
  """

  ids_BT: jax.Array
  at_BT: jax.Array


class MaskRules(NamedTuple):
  """The mask and soft cap of a block of queries and keys; static.

  Attributes:
    is_diagonal: queries and keys are the same tokens, in order of position. Else all keys come
      before all queries.
    max_segments: the most segments of a row, one of padding included.
    window: a token sees itself and the `window - 1` tokens before it; None = all before it.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None = they stay.
  """

  is_diagonal: bool
  max_segments: int
  window: int | None = None
  soft_cap: float | None = None


def forward(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  queries: TokenPositions,
  keys: TokenPositions,
  rules: MaskRules,
) -> tuple[jax.Array, jax.Array]:
  """Attend from queries to keys; scores are scaled by head_dim^-1/2.

  Args:
    q_BTNH: queries [batch, T, heads, head_dim].
    k_BSKH: keys [batch, S, kv_heads, head_dim]; kv_heads divides heads.
    v_BSKV: values like the keys, of any width.
    queries: positions and segments of the queries.
    keys: positions and segments of the keys.
    rules: which keys a query sees.

  Returns:
    y_BTNV, float32 or wider (a kernel: any float), and the logarithms of the softmax's denominators
    lse_BTN, float32 or wider. A query that sees no key has y = 0 and lse = -inf.
  """
  wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
  scores_BKGTS, seen_BTS, _ = _scores(q_BTNH, k_BSKH, queries, keys, rules)
  scores_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, -jnp.inf)
  lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
  weights_BKGTS = _weights(scores_BKGTS, lse_BKGT).astype(q_BTNH.dtype)
  y_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", weights_BKGTS, v_BSKV, preferred_element_type=wide)
  lse_BTKG = jnp.moveaxis(lse_BKGT, 3, 1)
  by_head = q_BTNH.shape[:3]
  return y_BTKGV.reshape(*by_head, -1), lse_BTKG.reshape(by_head)


def backward(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  queries: TokenPositions,
  keys: TokenPositions,
  y_BTNV: jax.Array,
  lse_BTN: jax.Array,
  dy_BTNV: jax.Array,
  rules: MaskRules,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients through these keys (FlashAttention-2, arXiv:2307.08691, section 2.2).

  Args:
    q_BTNH: queries, as in `forward`.
    k_BSKH: keys.
    v_BSKV: values.
    queries: positions and segments of the queries.
    keys: positions and segments of the keys.
    y_BTNV: the result of attention to *all* keys.
    lse_BTN: the statistics of attention to all keys: the attention weights are `exp(score - lse)`.
    dy_BTNV: gradient of `y_BTNV`.
    rules: which keys a query sees.

  Returns:
    dq_BTNH, dk_BSKH, dv_BSKV: float32 or wider (a kernel: any float); 0 for tokens that neither see
    nor are seen.
  """
  wide, dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32), q_BTNH.dtype
  scores_BKGTS, seen_BTS, slope_BKGTS = _scores(q_BTNH, k_BSKH, queries, keys, rules)
  scores_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, -jnp.inf)
  grouped = lambda a: a.reshape(*a.shape[:2], k_BSKH.shape[2], -1, *a.shape[3:])
  by_score = lambda a_BTN: jnp.moveaxis(grouped(a_BTN), 1, 3)
  weights_BKGTS = _weights(scores_BKGTS, by_score(lse_BTN))
  product = lambda formula, a, b: jnp.einsum(formula, a, b, preferred_element_type=wide)
  dy_BTKGV = grouped(dy_BTNV)
  dv_BSKV = product("BKGTS,BTKGV->BSKV", weights_BKGTS.astype(dtype), dy_BTKGV)
  dweights_BKGTS = product("BTKGV,BSKV->BKGTS", dy_BTKGV, v_BSKV)
  mean_BTN = product("BTNV,BTNV->BTN", y_BTNV, dy_BTNV)
  dscores_BKGTS = weights_BKGTS * (dweights_BKGTS - by_score(mean_BTN)[..., None])
  if slope_BKGTS is not None:
    dscores_BKGTS *= slope_BKGTS
  dscores_BKGTS = (dscores_BKGTS * q_BTNH.shape[-1] ** -0.5).astype(dtype)
  dq_BTKGH = product("BKGTS,BSKH->BTKGH", dscores_BKGTS, k_BSKH)
  dk_BSKH = product("BKGTS,BTKGH->BSKH", dscores_BKGTS, grouped(q_BTNH))
  return dq_BTKGH.reshape(q_BTNH.shape), dk_BSKH, dv_BSKV


def _scores(q_BTNH, k_BSKH, queries, keys, rules):
  """Scores, which of them count, and the derivative of the soft cap (None without one)."""
  wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
  batch, num_queries, _, width = q_BTNH.shape
  q_BTKGH = q_BTNH.reshape(batch, num_queries, k_BSKH.shape[2], -1, width)
  scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
  scores, slope = scores * width**-0.5, None
  if rules.soft_cap is not None:
    share = jnp.tanh(scores / rules.soft_cap)
    scores, slope = rules.soft_cap * share, 1 - share**2
  distance_BTS = queries.at_BT[:, :, None] - keys.at_BT[:, None, :]
  seen_BTS = (queries.ids_BT[:, :, None] == keys.ids_BT[:, None, :]) & (distance_BTS >= 0)
  if rules.window is not None:
    seen_BTS &= distance_BTS < rules.window
  return scores, seen_BTS, slope


def _weights(scores, lse):
  """`exp(score - lse)`; 0 where nothing is seen, whose logarithm is no number to subtract."""
  return jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])


def merge_attention(*parts: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
  """Merge attention to disjoint sets of keys (arXiv:2310.01889, section 3).

  Args:
    parts: for each set of keys y_BTNV and lse_BTN of the same queries, as `forward` returns them.

  Returns:
    y_BTNV and lse_BTN of attention to all keys, float32 or wider.
  """
  lses = jnp.stack([lse for _, lse in parts])
  lse = jax.nn.logsumexp(lses, axis=0)
  shares = jnp.exp(lses - jnp.where(jnp.isfinite(lse), lse, 0))
  weighted = (y * share[..., None] for (y, _), share in zip(parts, shares, strict=True))
  return functools.reduce(jnp.add, weighted), lse
