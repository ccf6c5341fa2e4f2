"""What cuDNN's flash attention computes from the arguments that it gets, in plain JAX.

It reads lengths and offsets as the library does, flattened over the batch, and writes NaN wherever
the library writes nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from ats_jax.ops import _compat


class Pieces(NamedTuple):
  """Where the segments are that a call is about, in a batch whose rows follow one another.

  Attributes:
    starts_R: int32 first token of each.
    lengths_R: int32; 0 = there is none.
    piece_X: int32 which of them each token of the batch is of; -1 = none.
    place_X: int32 place of the token in it.
  """

  starts_R: jax.Array
  lengths_R: jax.Array
  piece_X: jax.Array
  place_X: jax.Array


def install(monkeypatch: pytest.MonkeyPatch) -> None:
  """Put it in cuDNN's place."""
  monkeypatch.setattr(_compat, "cudnn_attention_forward", forward)
  monkeypatch.setattr(_compat, "cudnn_attention_backward", backward)


def forward(q, k, v, starts, lengths, scale, window=None):
  """As `_compat.cudnn_attention_forward`."""
  dtype, (q, k, v) = q.dtype, in_float32(q, k, v)
  of_q, of_k = pieces(q, k, starts, lengths)
  scores = scores_of(q, k, of_q, of_k, scale, window)
  lse = jax.nn.logsumexp(scores, axis=-1)  # [kv heads, group, tokens of the batch]
  y = jnp.einsum("kgts,skh->tkgh", weights(scores, lse), flat(v)).reshape(q.shape)
  y = jnp.where(of_q.piece_X.reshape(*q.shape[:2], 1, 1) >= 0, y, jnp.nan)
  lse = lse.reshape(-1, lse.shape[-1])
  place = jnp.arange(q.shape[1])
  token = jnp.minimum(of_q.starts_R[:, None] + place, len(of_q.piece_X) - 1)
  written = place < of_q.lengths_R[:, None]
  return y.astype(dtype), jnp.where(written[:, None], jnp.swapaxes(lse[:, token], 0, 1), jnp.nan)


def backward(q, k, v, starts, lengths, y, lse, dy, scale, window=None):
  """As `_compat.cudnn_attention_backward`: FlashAttention-2 (arXiv:2307.08691), algorithm 2."""
  dtype, (q, k, v, y, dy) = q.dtype, in_float32(q, k, v, y, dy)
  of_q, of_k = pieces(q, k, starts, lengths)
  scores = scores_of(q, k, of_q, of_k, scale, window)
  by_head = lambda a: jnp.moveaxis(a, -1, 0).reshape(k.shape[2], -1, a.shape[0])  # [k, g, t]
  grouped = lambda a: flat(a).reshape(len(of_q.piece_X), k.shape[2], -1, a.shape[-1])
  p = weights(scores, by_head(lse[of_q.piece_X, :, of_q.place_X]))
  dv = jnp.einsum("kgts,tkgh->skh", p, grouped(dy))
  dp = jnp.einsum("tkgh,skh->kgts", grouped(dy), flat(v))
  mean = by_head(jnp.sum(flat(y) * flat(dy), axis=-1))
  ds = p * (dp - mean[..., None]) * scale
  dq = jnp.einsum("kgts,skh->tkgh", ds, flat(k)).reshape(q.shape)
  dk = jnp.einsum("kgts,tkgh->skh", ds, grouped(q))
  at = lambda of, a, like: jnp.where(
    of.piece_X.reshape(*like.shape[:2], 1, 1) >= 0, a.reshape(like.shape), jnp.nan
  ).astype(dtype)
  return at(of_q, dq, q), at(of_k, dk, k), at(of_k, dv, v)


def pieces(q: Any, k: Any, starts: Any, lengths: Any) -> tuple[Pieces, Pieces]:
  """Of the queries and of the keys."""
  if starts is None:
    batch, seq = q.shape[:2]
    starts, lengths = (jnp.tile(jnp.array(a), (batch, 1)) for a in ([0, -1, -1], [seq, -1]))
  assert lengths.shape[1] > 1  # or cuDNN takes the layout of rows that are not packed
  fixed = _compat.cudnn._fix_seqlen_offsets(lengths, lengths, starts, starts, q, k)
  q_lengths, kv_lengths, q_offsets, kv_offsets = (a.reshape(-1) for a in fixed)
  of = lambda x, offsets, sizes: _pieces(
    offsets[: len(sizes)] // (x.shape[2] * x.shape[3]), sizes, x.shape[0] * x.shape[1]
  )
  return of(q, q_offsets, q_lengths), of(k, kv_offsets, kv_lengths)


def _pieces(starts_R, lengths_R, tokens):
  place_XR = jnp.arange(tokens)[:, None] - starts_R
  inside_XR = (place_XR >= 0) & (place_XR < lengths_R)
  piece_X = jnp.where(jnp.any(inside_XR, axis=1), jnp.argmax(inside_XR, axis=1), -1)
  return Pieces(starts_R, lengths_R, piece_X, jnp.arange(tokens) - starts_R[piece_X])


def scores_of(q, k, of_q, of_k, scale, window):
  """Scores, -inf where a query sees nothing: [kv heads, group, queries, keys] of the batch."""
  seen = (of_q.piece_X[:, None] == of_k.piece_X) & (of_q.piece_X[:, None] >= 0)
  distance = of_q.place_X[:, None] - of_k.place_X
  seen &= (distance >= 0) & (distance < (window or len(of_k.piece_X)))
  q = flat(q).reshape(len(of_q.piece_X), k.shape[2], -1, q.shape[-1])
  return jnp.where(seen, scale * jnp.einsum("tkgh,skh->kgts", q, flat(k)), -jnp.inf)


def weights(scores, lse):
  """`exp(score - lse)`, 0 where nothing is seen."""
  return jnp.exp(scores - jnp.where(jnp.isneginf(scores), 0, lse[..., None]))


def in_float32(*arrays):
  return [a.astype(jnp.float32) for a in arrays]


def flat(x):
  """The rows of a batch after one another."""
  return x.reshape(-1, *x.shape[2:])
