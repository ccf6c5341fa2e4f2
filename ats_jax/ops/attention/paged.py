"""Attention of new tokens to keys and values in pages (PagedAttention, arXiv:2309.06180).

Letters: B rows, T new tokens, N query heads, K key/value heads, H head_dim, X keys and values of a
head, G pages in all, P slots of a page, W pages of a row.

Pages are a tuple of arrays: [G, P, ..., all values of a slot], and in 8 bits behind it their scales
[G, P, ..., one for each part of a slot].
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.attention.causal import attend_to_slots
from ats_jax.ops.registry import XLA, Kernels

SCALE_DTYPE = jnp.bfloat16  # of 8 bits; in float32, scales of narrow heads would take much


def narrowed(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """Round to 8 bits, with a scale for each vector along the last dimension.

  Args:
    x: [..., width].
    dtype: int8 or float8_e4m3fn.

  Returns:
    Values in `dtype`, and their scales [..., 1].
  """
  whole = jnp.issubdtype(dtype, jnp.integer)
  limit = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
  x = x.astype(jnp.float32)
  scale = (jnp.max(jnp.abs(x), axis=-1, keepdims=True) / limit).astype(SCALE_DTYPE)
  x /= jnp.where(scale > 0, scale, 1).astype(jnp.float32)
  x = jnp.clip(jnp.round(x) if whole else x, -limit, limit)  # a scale may be rounded down
  return x.astype(dtype), scale


def widened(values: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """What `narrowed` stands for."""
  return (values.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)


def write(
  pages: Sequence[jax.Array],
  parts: Sequence[jax.Array],
  table_BW: jax.Array,
  index_BT: jax.Array,
) -> tuple[jax.Array, ...]:
  """Put what new tokens bring into their slots.

  Args:
    pages: values, and perhaps their scales.
    parts: [rows, new tokens, ...], which are together as wide as a slot.
    table_BW: int32 pages of each row, in order.
    index_BT: int32 slot of each token in its row; one behind the table is not written.
  """
  size = pages[0].shape[1]
  of_parts = [(part.astype(pages[0].dtype),) for part in parts]
  if len(pages) > 1:
    of_parts = [narrowed(part, pages[0].dtype) for part in parts]
  new = [jnp.concatenate(of, axis=-1) for of in zip(*of_parts, strict=True)]
  page_BT = page_of(pages, table_BW, index_BT)
  put = lambda into, x: into.at[page_BT, index_BT % size].set(x, mode="drop")
  return tuple(put(into, x) for into, x in zip(pages, new, strict=True))


def page_of(pages: Sequence[jax.Array], table_BW: jax.Array, index_BT: jax.Array) -> jax.Array:
  """The page [rows, tokens] of slots of rows, as of `write`; the number of pages = none."""
  count, size = pages[0].shape[:2]
  table_BW = jnp.pad(table_BW, ((0, 0), (0, 1)), constant_values=count)
  place_BT = jnp.minimum(index_BT // size, table_BW.shape[1] - 1)
  return jnp.take_along_axis(table_BW, place_BT, axis=1)


def read(
  pages: Sequence[jax.Array], table_BW: jax.Array, widths: Sequence[int], dtype: jnp.dtype
) -> list[jax.Array]:
  """The parts of the slots of each row, [rows, W * P, ..., width] in `dtype` if they have scales.

  Args:
    pages: values, and perhaps their scales.
    table_BW: int32 pages of each row, in order.
    widths: of the two parts of a slot.
    dtype: of the activations.
  """
  get = lambda a: a.at[table_BW].get(mode="clip").reshape(len(table_BW), -1, *a.shape[2:])
  values, *scales = map(get, pages)
  parts = jnp.split(values, [widths[0]], axis=-1)
  if not scales:
    return parts
  of_parts = jnp.split(scales[0], 2, axis=-1)
  return [widened(*of, dtype) for of in zip(parts, of_parts, strict=True)]


def paged_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  pages: Sequence[jax.Array],
  table_BW: jax.Array,
  index_BT: jax.Array,
  *,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
  kernels: Kernels = XLA,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Put new tokens into pages, and attend causally to the slots of their rows.

  Scores are scaled by head_dim^-1/2; softmax in float32.

  Args:
    q_BTNH: queries of the new tokens.
    k_BTKH: their keys.
    v_BTKH: their values.
    pages: [G, P, K, X] keys, and behind those of each head its values; in 8 bits also the scales of
      both, [G, P, K, 2].
    table_BW: int32 pages of each row, in order.
    index_BT: int32 slot of each token in its row, as of `write`; it sees the slots up to its own.
    window: as in `causal.attention`, as the soft cap and sinks.
    soft_cap: of scores.
    sinks_N: logits of a place that every token sees.
    kernels: the chosen implementations.

  Returns:
    The output like the queries, and the pages with the tokens in them.
  """
  kernel = registry.kernel("paged_attention", slot_of(pages[0].dtype), kernels)
  options, lengths_B = {"window": window, "soft_cap": soft_cap}, index_BT[:, 0] + 1
  if kernel is None or q_BTNH.shape[1] > 1 or sinks_N is not None:
    pages = write(pages, (k_BTKH, v_BTKH), table_BW, index_BT)
    k_BSKH, v_BSKH = read(pages, table_BW, [q_BTNH.shape[-1]] * 2, q_BTNH.dtype)
    y_BTNH = attend_to_slots(q_BTNH, k_BSKH, v_BSKH, index_BT, window, soft_cap, sinks_N)
    return y_BTNH, pages
  if len(pages) > 1:  # rounded to 8 bits by XLA
    pages = write(pages, (k_BTKH, v_BTKH), table_BW, index_BT)
    y_BNH = kernel(q_BTNH[:, 0], *pages, table_BW, lengths_B, **options)
    return y_BNH[:, None], pages
  count, size = pages[0].shape[:2]
  page_B = page_of(pages, table_BW, index_BT)[:, 0]
  slot_B = jnp.where(page_B < count, page_B * size + index_BT[:, 0] % size, -1)
  new = (q_BTNH[:, 0], k_BTKH[:, 0], v_BTKH[:, 0])
  y_BNH, *pages = kernel(*new, *pages, table_BW, lengths_B, slot_B, **options)
  return y_BNH[:, None], tuple(pages)


def slot_of(dtype: jnp.dtype) -> str:
  """The slot of the op that attends to pages of a dtype."""
  return {"int8": "one_token_int8", "float8_e4m3fn": "one_token_fp8"}.get(str(dtype), "one_token")
