"""Attention of new tokens to keys and values in pages (PagedAttention, arXiv:2309.06180).

Letters: B rows, T new tokens, N query heads, K key/value heads, H head_dim, X keys and values of a
head, G pages in all, P slots of a page, W pages of a row.
"""

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.attention.causal import attend_to_slots
from ats_jax.ops.registry import XLA, Kernels


def write(pages: jax.Array, new_BTx: jax.Array, table_BW: jax.Array, index_BT: jax.Array):
  """Put what new tokens bring into their slots.

  Args:
    pages: [G, P, ...].
    new_BTx: [rows, new tokens, ...], as wide as a slot.
    table_BW: int32 pages of each row, in order.
    index_BT: int32 slot of each token in its row; one behind the table is not written.
  """
  size = pages.shape[1]
  table_BW = jnp.pad(table_BW, ((0, 0), (0, 1)), constant_values=pages.shape[0])
  place_BT = jnp.minimum(index_BT // size, table_BW.shape[1] - 1)
  page_BT = jnp.take_along_axis(table_BW, place_BT, axis=1)
  return pages.at[page_BT, index_BT % size].set(new_BTx.astype(pages.dtype), mode="drop")


def read(pages: jax.Array, table_BW: jax.Array) -> jax.Array:
  """What the slots of each row hold, [rows, W * P, ...]."""
  rows = pages.at[table_BW].get(mode="clip")
  return rows.reshape(table_BW.shape[0], -1, *pages.shape[2:])


def paged_attention(
  q_BTNH: jax.Array,
  pages_GPKX: jax.Array,
  table_BW: jax.Array,
  index_BT: jax.Array,
  *,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
  kernels: Kernels = XLA,
) -> jax.Array:
  """Causal attention to slots of pages, scaled by head_dim^-1/2; softmax in float32.

  Args:
    q_BTNH: queries of the new tokens.
    pages_GPKX: keys, and behind those of each head its values; those of the new tokens among them.
    table_BW: int32 pages of each row, in order.
    index_BT: int32 slot of each query in its row; it sees the slots up to its own.
    window: as in `causal.attention`, as the soft cap and sinks.
    soft_cap: of scores.
    sinks_N: logits of a place that every token sees.
    kernels: the chosen implementations.
  """
  kernel = registry.kernel("paged_attention", "one_token", kernels)
  if kernel is None or q_BTNH.shape[1] > 1 or sinks_N is not None:
    k_BSKH, v_BSKH = jnp.split(read(pages_GPKX, table_BW), 2, axis=-1)
    return attend_to_slots(q_BTNH, k_BSKH, v_BSKH, index_BT, window, soft_cap, sinks_N)
  options = {"window": window, "soft_cap": soft_cap}
  y_BNH = kernel(q_BTNH[:, 0], pages_GPKX, table_BW, index_BT[:, 0] + 1, **options)
  return y_BNH[:, None]
