"""The slot of the op `paged_attention`.

Letters: B rows, N query heads, K key/value heads, H head_dim, G pages in all, P slots of a page,
W pages of a row.
"""

import jax
import jax.numpy as jnp

from kernels_triton import plan
from kernels_triton.call import call


def paged_attention(q_BNH, k_GPKH, v_GPKH, table_BW, length_B, *, window, soft_cap) -> jax.Array:
  """One query a row, which sees `length_B` slots; parts of a row in parallel, then joined."""
  launch = plan.paged_attention(q_BNH.shape, k_GPKH.shape, table_BW.shape[1], window, soft_cap)
  sizes = launch.constants
  rows, heads, width = q_BNH.shape
  parts = (rows, sizes["kv_heads"], sizes["splits"], sizes["block_m"])
  y, lse = call(
    launch,
    {"q": q_BNH, "k": k_GPKH, "v": v_GPKH, "table": table_BW, "lengths": length_B},
    {
      "parts": jax.ShapeDtypeStruct((*parts, width), jnp.float32),
      "lse": jax.ShapeDtypeStruct(parts, jnp.float32),
    },
  )
  group = heads // sizes["kv_heads"]
  y, lse = y[..., :group, :], lse[..., :group]
  share = jax.nn.softmax(lse, axis=2)
  return jnp.sum(y * share[..., None], axis=2).reshape(q_BNH.shape).astype(q_BNH.dtype)
