"""Table lookup.

Letters: B batch, T seq, V vocab, D d_model, C tokens of a chunk, S devices along a row.
"""

import functools

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import einsum, gather_rows, num_shards, reshape, reshard
from ats_jax.sharding.pipeline import row_axis

TABLE_AXES = ("vocab_rows", "act_embed")
CHUNK_POSITIONS = 1024  # of each row, whose one-hot rows exist at one time


def embedding_lookup(
  table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype, *, deterministic: bool
) -> jax.Array:
  """Rows `table[tokens]`, cast to `dtype`.

  Args:
    table_VD: [vocab, d_model].
    tokens_BT: int32 [batch, seq].
    dtype: of the result.
    deterministic: compute the table's gradient as a one-hot matmul, which adds in a fixed order,
      instead of a scatter-add, which on a GPU does not. XLA can make the scatter itself
      deterministic; that was slower (docs/lab/log.md).

  Returns:
    [batch, seq, d_model].
  """
  if deterministic:
    return _deterministic(table_VD, tokens_BT, dtype)
  return _lookup(table_VD, tokens_BT, dtype)


def _lookup(table_VD, tokens_BT, dtype):
  rows = row_axis(tokens_BT.shape[0])
  return gather_rows(table_VD, tokens_BT, axes=(rows, "seq", "act_embed")).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _deterministic(table_VD, tokens_BT, dtype):
  return _lookup(table_VD, tokens_BT, dtype)


def _forward(table_VD, tokens_BT, dtype):
  # An empty slice carries the table's size and dtype without keeping the table.
  return _lookup(table_VD, tokens_BT, dtype), (table_VD[:, :0], tokens_BT)


def _backward(dtype, residuals, dx_BTD):
  del dtype
  like_V0, tokens_BT = residuals
  vocab, (batch, seq, d_model) = like_V0.shape[0], dx_BTD.shape
  ways = num_shards("seq")
  own = seq // ways  # positions of a row on a device
  chunk = next(c for c in range(min(CHUNK_POSITIONS, own), 0, -1) if own % c == 0)
  axes = (row_axis(batch), "seq", None, None)

  def split(a, *rest):
    shape = (batch, ways, own // chunk, chunk, *rest)
    return jnp.moveaxis(reshape(a, shape, axes=axes + (None,) * len(rest)), 2, 0)

  def step(dtable_VD, inputs):
    tokens_BSC, dx_BSCD = inputs
    one_hot_BSCV = jax.nn.one_hot(tokens_BSC, vocab, dtype=dx_BSCD.dtype)
    part_VD = einsum(
      "BSCV,BSCD->VD", one_hot_BSCV, dx_BSCD, axes=TABLE_AXES, preferred_element_type=jnp.float32
    )
    return dtable_VD + part_VD, None

  zeros_VD = reshard(jnp.zeros((vocab, d_model), jnp.float32), *TABLE_AXES)
  dtable_VD, _ = jax.lax.scan(step, zeros_VD, (split(tokens_BT), split(dx_BTD, d_model)))
  return dtable_VD.astype(like_V0.dtype), None


_deterministic.defvjp(_forward, _backward)
