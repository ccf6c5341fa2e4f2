"""Embedding lookup.

The devices that share the rows of a batch have parts of the table's width. Each looks up its part
of the rows of all of them, and an all-to-all brings the parts of a row together. So no device has
the whole table, or the activations of the others at full width.

Letters: B batch, T seq, V vocab, D d_model, d the part of it on a device, C tokens of a chunk,
W devices that have parts of the width.
"""

import functools

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import (
  all_gather,
  all_sum,
  all_to_all,
  axis_index,
  island,
  num_shards,
  row_axis,
)

CHUNK_POSITIONS = 1024  # of each row, whose one-hot rows exist at one time on one device


def embedding_lookup(
  table_VD: jax.Array,
  tokens_BT: jax.Array,
  dtype: jnp.dtype,
  *,
  deterministic: bool,
  width: str = "embed",
) -> jax.Array:
  """Rows `table[tokens]`, cast to `dtype`.

  Args:
    table_VD: [vocab, d_model], sharded as ("vocab", `width`).
    tokens_BT: int32 [batch, seq].
    dtype: the dtype of the result.
    deterministic: compute the table's gradient as a one-hot matmul, which adds in a fixed order,
      instead of a scatter-add, which on a GPU does not. XLA can make the scatter itself
      deterministic; that was slower (docs/lab/log.md).
    width: logical axis of the table's width.

  Returns:
    [batch, seq, d_model].
  """
  return _lookup(table_VD, tokens_BT, dtype, deterministic, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _lookup(table_VD, tokens_BT, dtype, deterministic, width):
  del deterministic  # only the gradient differs

  def local(table_Vd, tokens_BT):
    tokens_BT = all_gather(tokens_BT, width)
    if num_shards("vocab") == 1:
      rows_BTd = table_Vd.at[tokens_BT].get().astype(dtype)
    else:
      index_BT, is_own_BT = _local_rows(tokens_BT, len(table_Vd))
      rows_BTd = table_Vd.at[index_BT].get(mode="clip").astype(dtype)
      rows_BTd = jnp.where(is_own_BT[..., None], rows_BTd, jnp.zeros((), dtype))
    return all_sum(_to_rows(rows_BTd, width), "vocab")

  tokens, x = _axes(tokens_BT, width)
  return island(local, in_axes=(("vocab", width), tokens), out_axes=x)(table_VD, tokens_BT)


def _forward(table_VD, tokens_BT, *how):
  # An empty slice carries the table's size and dtype without keeping the table.
  return _lookup(table_VD, tokens_BT, *how), (table_VD[:, :0], tokens_BT)


def _backward(dtype, deterministic, width, residuals, dx_BTD):
  del dtype
  like_V0, tokens_BT = residuals
  own = len(like_V0) // num_shards("vocab")
  add_up = _one_hot_sums if deterministic else _scattered_sums
  add_up = functools.partial(add_up, ways=num_shards(width))
  tokens, x = _axes(tokens_BT, width)

  def local(tokens_BT, dx_BTD):
    tokens_BT = all_gather(tokens_BT, width)
    dtable_Vd = add_up(tokens_BT, _to_widths(dx_BTD, width), own, like_V0.dtype)
    return all_sum(dtable_Vd, *tokens, excluding=width).astype(like_V0.dtype)

  dtable_VD = island(local, in_axes=(tokens, x), out_axes=("vocab", width))(tokens_BT, dx_BTD)
  return dtable_VD, None


_lookup.defvjp(_forward, _backward)


def _axes(tokens_BT, width):
  """Return the logical axes of tokens, and of their activations."""
  tokens = (row_axis(tokens_BT.shape[0]), "seq")
  return tokens, (*tokens, "act_embed" if width == "embed" else width)


# Blocks go by the first dimension: by another one, XLA would have the width outermost.
def _to_rows(x_BTd, width):
  """All-to-all: a shard of the width of all rows to the full width of this device's rows."""
  ways, (batch, seq, size) = num_shards(width), x_BTd.shape
  x_WBTd = all_to_all(x_BTd, width).reshape(ways, batch // ways, seq, size)
  return jnp.moveaxis(x_WBTd, 0, 2).reshape(batch // ways, seq, ways * size)


def _to_widths(x_BTD, width):
  """All-to-all: the full width of this device's rows to a shard of the width of all rows."""
  ways, (batch, seq, size) = num_shards(width), x_BTD.shape
  x_WBTd = jnp.moveaxis(x_BTD.reshape(batch, seq, ways, size // ways), 2, 0)
  return all_to_all(x_WBTd.reshape(ways * batch, seq, size // ways), width)


def _local_rows(tokens_BT, own):
  """Indices into this device's shard of the vocabulary, and which tokens are in it."""
  index_BT = tokens_BT - axis_index("vocab") * own
  return index_BT, (index_BT >= 0) & (index_BT < own)


def _scattered_sums(tokens_BT, dx_BTd, own, dtype, ways):
  """Sum the gradient of the table by a scatter-add in its dtype; the order is not fixed."""
  del ways
  index_BT, is_own_BT = _local_rows(tokens_BT, own)
  index_BT = jnp.where(is_own_BT, index_BT, own)  # behind the last row: dropped
  zeros_Vd = jnp.zeros((own, dx_BTd.shape[-1]), dtype)
  return zeros_Vd.at[index_BT].add(dx_BTd.astype(dtype), mode="drop")


def _one_hot_sums(tokens_BT, dx_BTd, own, dtype, ways):
  """Sum the gradient of the table in float32 by one-hot matmuls, some positions at a time."""
  del dtype
  batch, seq, width = dx_BTd.shape
  index_BT, _ = _local_rows(tokens_BT, own)  # one that is elsewhere has a row of zeros
  most = max(1, min(CHUNK_POSITIONS // ways, seq))
  chunk = next(c for c in range(most, 0, -1) if seq % c == 0)
  split = lambda a: jnp.moveaxis(a.reshape(batch, seq // chunk, chunk, *a.shape[2:]), 1, 0)

  def step(dtable_Vd, inputs):
    index_BC, dx_BCd = inputs
    one_hot_BCV = jax.nn.one_hot(index_BC, own, dtype=dx_BCd.dtype)
    part_Vd = jnp.einsum("BCV,BCd->Vd", one_hot_BCV, dx_BCd, preferred_element_type=jnp.float32)
    return dtable_Vd + part_Vd, None

  zeros_Vd = jnp.zeros((own, width), jnp.float32)
  return jax.lax.scan(step, zeros_Vd, (split(index_BT), split(dx_BTd)))[0]
