"""The slots of the op `paged_attention`.

Letters: B rows, N query heads, K key/value heads, H head_dim, X keys and values of a head, G pages
in all, P slots of a page, W pages of a row.
"""

import jax
import jax.numpy as jnp

from kernels_triton import plan
from kernels_triton.call import call


def paged_attention(
  q_BNH, k_BKH, v_BKH, pages_GPKX, table_BW, length_B, slot_B, *, window, soft_cap
) -> tuple[jax.Array, jax.Array]:
  """One token a row, which is put into a slot of all, and whose query sees `length_B` of its row.

  Parts of a row in parallel, then joined.
  """
  arrays = {"new": jnp.concatenate([q_BNH, k_BKH, v_BKH], axis=1), "pages": pages_GPKX}
  arrays |= {"table": table_BW, "lengths": length_B, "into": slot_B}
  y_BNH, pages_GPKX = _attention(q_BNH.shape, arrays, window, soft_cap)
  return y_BNH, pages_GPKX


def paged_attention_int8(
  q_BNH, pages_GPKX, scales_GPK2, table_BW, length_B, *, window, soft_cap
) -> jax.Array:
  """One query a row, to pages in int8 that have its token, a scale for each key and each value."""
  arrays = {"new": q_BNH, "pages": pages_GPKX, "scales": scales_GPK2}
  arrays |= {"table": table_BW, "lengths": length_B}
  return _attention(q_BNH.shape, arrays, window, soft_cap)[0]


def paged_attention_fp8(
  q_BNH, pages_GPKX, scales_GPK2, table_BW, length_B, *, window, soft_cap
) -> jax.Array:
  """Likewise of pages in float8_e4m3fn."""
  bits_GPKX = jax.lax.bitcast_convert_type(pages_GPKX, jnp.int8)
  arrays = {"new": q_BNH, "pages": bits_GPKX, "scales": scales_GPK2}
  arrays |= {"table": table_BW, "lengths": length_B}
  return _attention(q_BNH.shape, arrays, window, soft_cap, e4m3=True)[0]


def _attention(q_shape, arrays, window, soft_cap, *, e4m3=False) -> list[jax.Array]:
  """The result like the queries, and the pages if the kernel writes to them."""
  (rows, heads, width), pages, scaled = q_shape, arrays["pages"], "scales" in arrays
  row_pages, dtype = arrays["table"].shape[1], arrays["new"].dtype
  launch = plan.paged_attention(
    q_shape, pages.shape, row_pages, window, soft_cap, scaled=scaled, e4m3=e4m3
  )
  kv_heads, splits = launch.constants["kv_heads"], launch.constants["splits"]
  group = heads // kv_heads
  made = {
    "parts": jax.ShapeDtypeStruct(
      (rows, kv_heads, splits, group, width), dtype if splits == 1 else jnp.float32
    ),
    "lse": jax.ShapeDtypeStruct((rows, kv_heads, splits, group), jnp.float32),
  }
  in_place = {} if scaled else {"written": "pages"}
  made |= {name: jax.ShapeDtypeStruct(pages.shape, pages.dtype) for name in in_place}
  parts, lse, *written = call(launch, arrays, made, in_place)
  if splits == 1:
    return [parts.reshape(q_shape), *written]
  merge = plan.merge(rows, kv_heads, group, splits, width)
  of_parts = {"parts": parts, "lse": lse}
  return [*call(merge, of_parts, {"out": jax.ShapeDtypeStruct(q_shape, dtype)}), *written]
