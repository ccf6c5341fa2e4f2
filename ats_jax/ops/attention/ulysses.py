"""Rows that are cut along their positions, for attention (Ulysses, arXiv:2309.14509, section 3.1).

Before attention the devices along a row swap positions for heads, and after it back. Between the
two each of them has whole rows of some of the heads, so that any kernel runs unchanged.

For local arrays: call these inside an island. Letters: B batch, T positions of a row, t those on a
device, N query heads, n those of them with whole rows, K key/value heads, H head_dim, V
width of a value.
"""

import math

import jax
import jax.numpy as jnp

from ats_jax.ops.attention.along_row import WholeRowAttention, checkpoint_inputs
from ats_jax.sharding.apply import num_shards
from ats_jax.sharding.shards import swap_shards


def attend_by_heads(
  attend_rows: WholeRowAttention,
  q_BtNH: jax.Array,
  k_BtKH: jax.Array,
  v_BtKV: jax.Array,
  segment_ids_BT: jax.Array,
  sinks_n: jax.Array | None,
) -> jax.Array:
  """Attention where each device attends with whole rows of some heads; y_BtNV."""
  # The arrays of whole rows have the names, so that what a policy keeps is not swapped again.
  whole = checkpoint_inputs(*to_whole_rows(q_BtNH, k_BtKH, v_BtKV))
  return to_sharded_rows(attend_rows(*whole, segment_ids_BT, sinks_n))


def to_whole_rows(
  q_BtNH: jax.Array, k_BtKH: jax.Array, v_BtKH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Swap positions for heads: all positions of some heads, from some positions of all heads.

  Where there are too few key/value heads for the devices, each is sent to all that have one of its
  query heads.

  Args:
    q_BtNH: queries [batch, positions of this device, heads, head_dim].
    k_BtKH: keys; their heads divide those of the queries.
    v_BtKH: values like the keys, of any width.

  Returns:
    Queries, keys and values with all positions, and this device's share of the heads.

  Raises:
    ValueError: if the devices along a row do not divide the query heads.
  """
  ways, heads, kv_heads = num_shards("seq"), q_BtNH.shape[2], k_BtKH.shape[2]
  if ways == 1:
    return q_BtNH, k_BtKH, v_BtKH
  if heads % ways:
    raise ValueError(
      f"attention: rows are cut over {ways} devices, which do not divide the {heads} heads that a "
      "device has: each takes whole rows of some heads. Use another mesh.context."
    )
  # The fewest copies with which a device gets whole heads, and those of its own queries alone: the
  # number of copies divides that of a key's query heads.
  copies = ways // math.gcd(kv_heads, ways)
  k_BtKH, v_BtKH = (jnp.repeat(a, copies, axis=2) if copies > 1 else a for a in (k_BtKH, v_BtKH))
  q, k, v = (swap_shards(a, "seq", split=2, join=1) for a in (q_BtNH, k_BtKH, v_BtKH))
  return q, k, v


def to_sharded_rows(y_BTnH: jax.Array) -> jax.Array:
  """Swap heads for positions: all heads at this device's positions; undoes `to_whole_rows`."""
  return swap_shards(y_BTnH, "seq", split=1, join=2)
