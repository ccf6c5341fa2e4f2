"""Causal attention over packed rows by kernels in Triton, with soft caps, windows and sinks.

Letters: B batch, T queries and keys, N query heads, K key/value heads, H head_dim, V width of a
value.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops.remat import ATTENTION_RESULTS
from kernels_triton import plan
from kernels_triton.call import call


def flash_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKV: jax.Array,
  segment_ids_BT: jax.Array,
  sinks_N: jax.Array | None,
  *,
  max_segments: int,
  window: int | None,
  soft_cap: float | None,
) -> jax.Array:
  """`ops.attention.causal.attention` of local arrays in bfloat16 or float16."""
  first_BT, last_BT = seen_runs(segment_ids_BT, window)
  launches = plan.attention(
    q_BTNH.shape,
    k_BTKH.shape,
    v_BTKV.shape[-1],
    soft_cap,
    sinks_N is not None,
    in_parts=max_segments > 1 or window is not None,
  )
  return _flash(q_BTNH, k_BTKH, v_BTKV, sinks_N, first_BT, last_BT, launches)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _flash(q_BTNH, k_BTKH, v_BTKV, sinks_N, first_BT, last_BT, launches):
  return _flash_forward(q_BTNH, k_BTKH, v_BTKV, sinks_N, first_BT, last_BT, launches)[0]


def _flash_forward(q_BTNH, k_BTKH, v_BTKV, sinks_N, first_BT, last_BT, launches):
  batch, seq, heads, _ = q_BTNH.shape
  launch, _, _ = launches
  sinks = jnp.zeros(heads) if sinks_N is None else sinks_N
  y_BTNV, lse_BNT = call(
    launch,
    {"q": q_BTNH, "k": k_BTKH, "v": v_BTKV, "first": first_BT, "sinks": sinks.astype(jnp.float32)},
    {
      "y": jax.ShapeDtypeStruct((batch, seq, heads, v_BTKV.shape[-1]), q_BTNH.dtype),
      "lse": jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
    },
  )
  y_BTNV = checkpoint_name(y_BTNV, ATTENTION_RESULTS[0])
  lse_BNT = checkpoint_name(lse_BNT, ATTENTION_RESULTS[1])
  return y_BTNV, (q_BTNH, k_BTKH, v_BTKV, sinks_N, first_BT, last_BT, y_BTNV, lse_BNT)


def _flash_backward(launches, saved, dy_BTNV):
  q_BTNH, k_BTKH, v_BTKV, sinks_N, first_BT, last_BT, y_BTNV, lse_BNT = saved
  _, of_keys, of_queries = launches
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  delta_BNT = product("BTNV,BTNV->BNT", y_BTNV, dy_BTNV)
  like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
  qkv = {"q": q_BTNH, "k": k_BTKH, "v": v_BTKV}
  rest = {"dy": dy_BTNV, "lse": lse_BNT, "delta": delta_BNT}
  gradients = {"dk": like(k_BTKH), "dv": like(v_BTKV)}
  dk_BTKH, dv_BTKV = call(of_keys, {**qkv, "last": last_BT, **rest}, gradients)
  (dq_BTNH,) = call(of_queries, {**qkv, "first": first_BT, **rest}, {"dq": like(q_BTNH)})
  dsinks_N = None
  if sinks_N is not None:  # its weight times (0 - y) . dy
    weight_BNT = jnp.exp(sinks_N[:, None] - lse_BNT)
    dsinks_N = -jnp.sum(weight_BNT * delta_BNT, axis=(0, 2)).astype(sinks_N.dtype)
  return dq_BTNH, dk_BTKH, dv_BTKV, dsinks_N, None, None


_flash.defvjp(_flash_forward, _flash_backward)


def seen_runs(segment_ids_BT: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
  """Find the first key that each query sees, and the last query that sees each key.

  Args:
    segment_ids_BT: int32, one contiguous run for each id.
    window: a token sees itself and the `window - 1` tokens before it; None = all before it.

  Returns:
    Two int32 arrays [batch, seq], which never fall along a row.
  """
  seq = segment_ids_BT.shape[1]
  at_T = jnp.arange(seq, dtype=jnp.int32)
  changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
  is_last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
  first_BT = jax.lax.cummax(jnp.where(is_first, at_T, 0), axis=1)
  last_BT = jax.lax.cummin(jnp.where(is_last, at_T, seq), axis=1, reverse=True)
  if window is not None:
    first_BT = jnp.maximum(first_BT, at_T - (window - 1))
    last_BT = jnp.minimum(last_BT, at_T + (window - 1))
  return first_BT, last_BT
