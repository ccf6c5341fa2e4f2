"""The slots of the op `paged_attention`.

Letters: B rows, N query heads, K key/value heads, H head_dim, X keys and values of a head, G pages
in all, P slots of a page, W pages of a row.
"""

import jax
import jax.numpy as jnp

from kernels_triton import plan
from kernels_triton.call import call


def paged_attention(q_BNH, pages_GPKX, table_BW, length_B, *, window, soft_cap) -> jax.Array:
  """One query a row, which sees `length_B` slots; parts of a row in parallel, then joined."""
  arrays = {"q": q_BNH, "pages": pages_GPKX, "table": table_BW, "lengths": length_B}
  return _attention(arrays, window, soft_cap)


def paged_attention_int8(
  q_BNH, pages_GPKX, scales_GPK2, table_BW, length_B, *, window, soft_cap
) -> jax.Array:
  """Likewise of pages in int8, with a scale for each key and for each value."""
  arrays = {"q": q_BNH, "pages": pages_GPKX, "scales": scales_GPK2}
  return _attention(arrays | {"table": table_BW, "lengths": length_B}, window, soft_cap)


def paged_attention_fp8(
  q_BNH, pages_GPKX, scales_GPK2, table_BW, length_B, *, window, soft_cap
) -> jax.Array:
  """Likewise of pages in float8_e4m3fn."""
  bits_GPKX = jax.lax.bitcast_convert_type(pages_GPKX, jnp.int8)
  arrays = {"q": q_BNH, "pages": bits_GPKX, "scales": scales_GPK2}
  arrays |= {"table": table_BW, "lengths": length_B}
  return _attention(arrays, window, soft_cap, e4m3=True)


def _attention(arrays, window, soft_cap, *, e4m3=False) -> jax.Array:
  q_BNH, scaled = arrays["q"], "scales" in arrays
  shapes = q_BNH.shape, arrays["pages"].shape, arrays["table"].shape[1]
  launch = plan.paged_attention(*shapes, window, soft_cap, scaled=scaled, e4m3=e4m3)
  sizes = launch.constants
  rows, heads, width = q_BNH.shape
  kv_heads, splits = sizes["kv_heads"], sizes["splits"]
  group = heads // kv_heads
  parts, lse = call(
    launch,
    arrays,
    {
      "parts": jax.ShapeDtypeStruct(
        (rows, kv_heads, splits, group, width), q_BNH.dtype if splits == 1 else jnp.float32
      ),
      "lse": jax.ShapeDtypeStruct((rows, kv_heads, splits, group), jnp.float32),
    },
  )
  if splits == 1:
    return parts.reshape(q_BNH.shape)
  merge = plan.merge(rows, kv_heads, group, splits, width)
  of_parts = {"parts": parts, "lse": lse}
  return call(merge, of_parts, {"out": jax.ShapeDtypeStruct(q_BNH.shape, q_BNH.dtype)})[0]
