"""Causal attention over packed rows, and over a key/value cache.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head_dim, M segments.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import Config
from ats_jax.ops import _compat, registry
from ats_jax.ops.obstacles import Device
from ats_jax.ops.registry import Choice
from ats_jax.sharding.apply import island

Q_AXES = ("batch", "seq", "heads", "head_dim")
KV_AXES = ("batch", "seq", "kv_heads", "head_dim")
TOKEN_AXES = ("batch", "seq")
# Names (jax.ad_checkpoint) of the output and of the softmax statistics. A policy that keeps both
# spares the backward pass a second run of attention.
SAVED_NAMES = ("attn_y", "attn_lse")


def choose(cfg: Config, platform: str, compute_capability: str = "0.0") -> Choice:
  """Decide which implementation training attention uses.

  Args:
    cfg: the run; `ops.attention` may name an implementation, `model.head_dim` is resolved.
    platform: "cpu", "gpu" or "tpu".
    compute_capability: of the GPU, e.g. "9.0".

  Raises:
    ValueError: if the implementation that was asked for cannot run here.
    FallbackError: if `ops.strict` is set and the fast implementation of a GPU cannot run.
  """
  device = Device(platform, compute_capability)
  return registry.choose_op(cfg, device, "attention")["forward"]


def attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  *,
  segment_ids_BT: jax.Array,
  max_segments: int,
  implementation: str,
) -> jax.Array:
  """Causal attention within segments, scaled by head_dim^-1/2; softmax in float32.

  Args:
    q_BTNH: queries [batch, seq, heads, head_dim].
    k_BTKH: keys [batch, seq, kv_heads, head_dim]; kv_heads divides heads.
    v_BTKH: values like the keys.
    segment_ids_BT: int32; a token sees tokens up to itself that carry its own id. Each id is one
      contiguous run.
    max_segments: runs in a row at most, padding's included.
    implementation: "xla" (the specification) or "cudnn".

  Returns:
    Array like the queries.
  """
  local = {"xla": _xla, "cudnn": _cudnn}[implementation]
  return island(
    lambda q, k, v, segments: local(q, k, v, segments, max_segments),
    in_axes=(Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES),
    out_axes=Q_AXES,
  )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)


def _xla(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, max_segments):
  del max_segments
  same_B1TT = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
  y_BTNH = jax.nn.dot_product_attention(
    q_BTNH, k_BTKH, v_BTKH, mask=same_B1TT, is_causal=True, implementation="xla"
  )
  return checkpoint_name(y_BTNH, SAVED_NAMES[0])


def _cudnn(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, max_segments):
  starts_BM, lengths_BM = segment_bounds(segment_ids_BT, max_segments)
  scale = q_BTNH.shape[-1] ** -0.5
  return _cudnn_named(q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cudnn_named(q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM, scale):
  """The kernel, with names on what its backward pass needs, so that a remat policy can keep it."""
  return _compat.cudnn_packed_attention(q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM, scale)


def _cudnn_forward(q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM, scale):
  inputs = (q_BTNH, k_BTKH, v_BTKH, starts_BM, lengths_BM)
  kernel = lambda q, k, v: _compat.cudnn_packed_attention(q, k, v, starts_BM, lengths_BM, scale)
  y_BTNH, pullback = jax.vjp(kernel, q_BTNH, k_BTKH, v_BTKH)
  leaves, structure = jax.tree.flatten(pullback)
  named_y = checkpoint_name(y_BTNH, SAVED_NAMES[0])

  def named(leaf):
    if leaf is y_BTNH:
      return named_y
    return leaf if any(leaf is x for x in inputs) else checkpoint_name(leaf, SAVED_NAMES[1])

  return named_y, jax.tree.unflatten(structure, map(named, leaves))


def _cudnn_backward(scale, pullback, dy_BTNH):
  del scale
  return *pullback(dy_BTNH), None, None


_cudnn_named.defvjp(_cudnn_forward, _cudnn_backward)


def segment_bounds(segment_ids_BT: jax.Array, max_segments: int) -> tuple[jax.Array, jax.Array]:
  """Find where each segment starts and how long it is.

  Args:
    segment_ids_BT: int32 [batch, seq], one contiguous run for each id.
    max_segments: M, runs in a row at most. More than that would be a wrong result, so the data
      pipeline never emits them (`data.max_segments`).

  Returns:
    Starts [batch, M + 1] and lengths [batch, M], int32, filled with -1 after the last segment.
  """
  batch, seq = segment_ids_BT.shape
  changed = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  is_start = jnp.concatenate([jnp.ones((batch, 1), bool), changed], axis=1)
  find = lambda row: jnp.nonzero(row, size=max_segments + 1, fill_value=seq)[0].astype(jnp.int32)
  bounds_BM = jax.vmap(find)(is_start)
  lengths_BM = bounds_BM[:, 1:] - bounds_BM[:, :-1]
  return (
    jnp.where(bounds_BM < seq, bounds_BM, -1),
    jnp.where(lengths_BM > 0, lengths_BM, -1),
  )


def cached_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  k_cache_BSKH: jax.Array,
  v_cache_BSKH: jax.Array,
  index_BT: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Write new keys and values into a cache, then attend to it.

  Args:
    q_BTNH: queries of the new tokens.
    k_BTKH: keys of the new tokens.
    v_BTKH: values of the new tokens.
    k_cache_BSKH: keys so far, S slots.
    v_cache_BSKH: values so far.
    index_BT: int32 slot of each new token; a query sees the slots up to its own.

  Returns:
    The output like the queries, and the two caches with the new tokens in their slots.
  """

  def local(q, k, v, k_cache, v_cache, index):
    rows = jnp.arange(q.shape[0])[:, None]
    k_cache = k_cache.at[rows, index].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[rows, index].set(v.astype(v_cache.dtype))
    visible_B1TS = (jnp.arange(k_cache.shape[1]) <= index[:, :, None])[:, None]
    y = jax.nn.dot_product_attention(q, k_cache, v_cache, mask=visible_B1TS, implementation="xla")
    return y, k_cache, v_cache

  return island(
    local,
    in_axes=(Q_AXES, KV_AXES, KV_AXES, KV_AXES, KV_AXES, TOKEN_AXES),
    out_axes=(Q_AXES, KV_AXES, KV_AXES),
  )(q_BTNH, k_BTKH, v_BTKH, k_cache_BSKH, v_cache_BSKH, index_BT)
