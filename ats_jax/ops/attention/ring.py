"""Rows that are cut along their positions, for attention: a ring (arXiv:2310.01889).

Each device keeps the queries of its positions, with all heads. Keys and values go round the devices
along the row, and what a device computes with each of them is joined by log-sum-exp. So there is no
limit by heads, and the next keys and values can travel while those at hand are used.

Of 2n chunks of a row over n devices, device i has the chunks i and 2n - 1 - i here (Llama 3,
arXiv:2407.21783, section 3.3.2; called zig-zag). In their order by position the last device would
have n times the work of the first, as attention is causal. In this order each has, with the keys of
every other device, work for two pairs of chunks: those of an earlier device i have one chunk before
both of its own, and those of a later one two chunks before its second.

For local arrays: call these inside an island. Letters: B batch, R positions of a row, T those on a
device, t = T / 2 of a chunk, N query heads, K key/value heads, H head_dim, V width of a value.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops import registry
from ats_jax.ops.attention import block
from ats_jax.ops.attention.along_row import (
  AttentionOptions,
  ContextParallel,
  WholeRowAttention,
  checkpoint_inputs,
)
from ats_jax.ops.attention.block import TokenPositions, merge_attention
from ats_jax.ops.remat import ATTENTION_RESULTS
from ats_jax.sharding.apply import axis_index, num_shards, permute

FIRST, SECOND = 0, 1  # the chunks of a device


@dataclasses.dataclass(frozen=True)
class Ring(ContextParallel):
  """Ring attention: devices keep all heads and pass on keys and values (`mesh.context_ring`)."""

  @property
  @override
  def sinks_axis(self) -> str:
    return "heads"

  @override
  def row_multiple(self) -> int:
    ways = num_shards("seq")
    return 2 * ways if ways > 1 else 1  # two chunks for each device

  @override
  def attend(
    self,
    attend_rows: WholeRowAttention,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BR: jax.Array,
    sinks_N: jax.Array | None,
    options: AttentionOptions,
  ) -> jax.Array:
    del attend_rows
    q, k, v = checkpoint_inputs(q_BTNH, k_BTKH, v_BTKV)
    return ring_attention(q, k, v, segment_ids_BR, sinks_N, options)


def ring_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKV: jax.Array,
  segment_ids_BR: jax.Array,
  sinks_N: jax.Array | None,
  options: AttentionOptions,
) -> jax.Array:
  """Attention of this device's positions to those of the whole row.

  Args:
    q_BTNH: queries of consecutive positions, in the order of devices.
    k_BTKH: keys of the same positions; their heads divide those of the queries.
    v_BTKV: values like the keys, of any width.
    segment_ids_BR: int32 segment ids of the whole row.
    sinks_N: float32 [heads], or None.
    options: the options of attention.

  Returns:
    y_BTNV, shaped like the queries, as wide as the values.

  Raises:
    ValueError: for an odd number of positions on a device, or a window or a soft cap with a kernel.
  """
  if (positions := q_BTNH.shape[1]) % 2:
    ways = num_shards("seq")
    raise ValueError(
      f"attention: a device has {positions} of {positions * ways} positions, in a ring of {ways} "
      f"devices two chunks of equal length are expected. Use rows of a multiple of {2 * ways}, or "
      "mesh.context_ring=false."
    )
  kernels = {options.kernels.of("attention_block", slot) for slot in ("forward", "backward")}
  if kernels != {"xla"} and (options.window, options.soft_cap) != (None, None):
    name = max(kernels - {"xla"})
    raise ValueError(
      f"attention: {name} has neither a window ({options.window}) nor a soft_cap "
      f"({options.soft_cap}) in a ring, whose chunks do not follow one another. "
      "Use ops.kernels=attention_block=xla, or mesh.context_ring=false."
    )
  q, k, v = map(to_zigzag, (q_BTNH, k_BTKH, v_BTKV))
  return from_zigzag(_ring(q, k, v, segment_ids_BR, sinks_N, options))


def chunk_owner(chunk: int, ways: int) -> int:
  """The device that has chunk `chunk` of the `2 * ways` chunks of a row in zig-zag order."""
  return min(chunk, 2 * ways - 1 - chunk)


def to_zigzag(x_BT: jax.Array) -> jax.Array:
  """Move from chunks 2i and 2i + 1 of a row [batch, T, ...] on device i to chunks i and 2n - 1 - i.

  The even chunks go to one device each, and so do the odd ones: two permutations.
  """
  ways = num_shards("seq")
  even, odd = (
    permute(x, "seq", [chunk_owner(2 * i + parity, ways) for i in range(ways)])
    for parity, x in enumerate(jnp.split(x_BT, 2, axis=1))
  )
  return _swap_on_odd_devices(even, odd)


def from_zigzag(x_BT: jax.Array) -> jax.Array:
  """Undo `to_zigzag`."""
  ways, parts = num_shards("seq"), []
  in_order = jnp.split(_swap_on_odd_devices(*jnp.split(x_BT, 2, axis=1)), 2, axis=1)
  for parity, x in enumerate(in_order):
    home = {chunk_owner(2 * i + parity, ways): i for i in range(ways)}
    parts.append(permute(x, "seq", [home[i] for i in range(ways)]))
  return jnp.concatenate(parts, axis=1)


def _swap_on_odd_devices(first, second):
  """Concatenate both chunks, swapped on odd devices, whose first chunk is odd."""
  is_even = axis_index("seq") % 2 == 0
  swapped = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
  return jnp.concatenate(swapped, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, options):
  """Attention in zig-zag order."""
  return _ring_forward(q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, options)[0]


def _ring_forward(q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, options):
  """Compute attention without residuals that grow with the devices.

  The backward pass sends keys and values again. Its residuals have names for remat policies.
  """
  run = _block_kernel("forward", block.forward, options)
  device, here, kv = axis_index("seq"), token_positions_at(segment_ids_BR, 0), (k_BTKH, v_BTKV)
  y_BTNV, lse_BTN = run(q_BTNH, *kv, here, here, options.rules(is_diagonal=True))
  merged, next_kv = (y_BTNV.astype(lse_BTN.dtype), lse_BTN), _send_to_next(kv)
  for step in range(1, num_shards("seq")):
    kv, merged = jax.lax.optimization_barrier((next_kv, merged))  # no more than two at a time
    next_kv = _send_to_next(kv) if step + 1 < num_shards("seq") else None
    pair = functools.partial(pair_of_chunks, is_earlier=device >= step)
    queries, keys = pair(here, SECOND), pair(token_positions_at(segment_ids_BR, step), FIRST)
    results = run(
      pair(q_BTNH, SECOND), *pair(kv, FIRST), queries, keys, options.rules(is_diagonal=False)
    )
    merged = _merge_pairs(merged, results, is_earlier=device >= step)
  y_BTNV, lse_BTN = merged
  if sinks_N is not None:  # they only enlarge the softmax's denominators
    without_BTN, lse_BTN = lse_BTN, jnp.logaddexp(lse_BTN, sinks_N)
    y_BTNV *= jnp.exp(without_BTN - lse_BTN)[..., None]
  y_BTNV = checkpoint_name(y_BTNV.astype(q_BTNH.dtype), ATTENTION_RESULTS[0])
  lse_BTN = checkpoint_name(lse_BTN, ATTENTION_RESULTS[1])
  return y_BTNV, (q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, y_BTNV, lse_BTN)


def _ring_backward(options, saved, dy_BTNV):
  """Send the gradients of keys and values round with them, and one step further to their device."""
  # Nothing begins before the gradient is there: a first step that is also the forward pass's would
  # be made once, and kept.
  saved, dy_BTNV = jax.lax.optimization_barrier((saved, dy_BTNV))
  q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, y_BTNV, lse_BTN = saved
  run = _block_kernel("backward", block.backward, options)
  wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
  as_wide = lambda arrays: tuple(a.astype(wide) for a in arrays)
  device, here, kv = axis_index("seq"), token_positions_at(segment_ids_BR, 0), (k_BTKH, v_BTKV)
  after = y_BTNV, lse_BTN, dy_BTNV
  dq_BTNH, *dkv = as_wide(run(q_BTNH, *kv, here, here, *after, options.rules(is_diagonal=True)))
  next_kv = _send_to_next(kv)
  for step in range(1, num_shards("seq")):
    kv, dq_BTNH = jax.lax.optimization_barrier((next_kv, dq_BTNH))
    next_kv = _send_to_next(kv) if step + 1 < num_shards("seq") else None
    dkv = _send_to_next(dkv)
    pair = functools.partial(pair_of_chunks, is_earlier=device >= step)
    queries, keys = pair(here, SECOND), pair(token_positions_at(segment_ids_BR, step), FIRST)
    (q, *others), rules = pair((q_BTNH, *after), SECOND), options.rules(is_diagonal=False)
    dq, *dkv_step = as_wide(run(q, *pair(kv, FIRST), queries, keys, *others, rules))
    added = functools.partial(_add_pairs, is_earlier=device >= step)
    dq_BTNH = added(dq_BTNH, dq, SECOND)
    dkv = [added(a, b, FIRST) for a, b in zip(dkv, dkv_step, strict=True)]
  dk_BTKH, dv_BTKV = _send_to_next(dkv)
  dsinks_N = None
  if sinks_N is not None:  # its weight times (0 - y) . dy
    weight_BTN = jnp.exp(sinks_N - lse_BTN)
    product_BTN = jnp.einsum("BTNV,BTNV->BTN", y_BTNV, dy_BTNV, preferred_element_type=wide)
    dsinks_N = -jnp.sum(weight_BTN * product_BTN, axis=(0, 1)).astype(sinks_N.dtype)
  gradients = (
    dq_BTNH.astype(q_BTNH.dtype),
    dk_BTKH.astype(k_BTKH.dtype),
    dv_BTKV.astype(v_BTKV.dtype),
  )
  return *gradients, None, dsinks_N


_ring.defvjp(_ring_forward, _ring_backward)


def _block_kernel(slot: str, otherwise: Callable, options: AttentionOptions) -> Callable:
  return registry.kernel("attention_block", slot, options.kernels) or otherwise


def _send_to_next(arrays):
  """Send keys and values, or their gradients, to the next device along the row, in a ring.

  They go as one array: of several that are sent in a step XLA lets one travel beside a kernel.
  """
  ways, (keys, _) = num_shards("seq"), arrays
  joined = permute(jnp.concatenate(arrays, axis=-1), "seq", [(i + 1) % ways for i in range(ways)])
  return tuple(jnp.split(joined, [keys.shape[-1]], axis=-1))


def token_positions_at(segment_ids_BR, step):
  """The positions of the keys that a device has at `step`: those of the device `step` before it."""
  (batch, length), ways = segment_ids_BR.shape, num_shards("seq")
  of_device = (axis_index("seq") - step) % ways
  chunks_2 = jnp.stack([of_device, 2 * ways - 1 - of_device])
  chunk = length // (2 * ways)
  ids = segment_ids_BR.reshape(batch, 2 * ways, chunk)[:, chunks_2]
  at = (chunks_2[:, None] * chunk + jnp.arange(chunk)).reshape(-1)
  return TokenPositions(
    ids.reshape(batch, -1), jnp.broadcast_to(at.astype(jnp.int32), (batch, 2 * chunk))
  )


def _halves(x_BT):
  batch, positions = x_BT.shape[:2]
  return x_BT.reshape(batch, 2, positions // 2, *x_BT.shape[2:])


def pair_of_chunks(tree: Any, always: int, is_earlier: jax.Array | bool) -> Any:
  """Select the two chunks of this step's pairs, as rows of a batch twice as large [2B, t, ...].

  A step computes two pairs of chunks. One is the second queries with the first keys, wherever these
  come from. The other is the first queries with the first keys if they come from an earlier device,
  else the second ones with the second ones.

  Args:
    tree: arrays [B, T, ...].
    always: the chunk that is in the first pair.
    is_earlier: whether keys and values come from an earlier device.
  """

  def of_array(x_BT):
    x_B2t = _halves(x_BT)
    other = jnp.where(is_earlier, x_B2t[:, FIRST], x_B2t[:, SECOND])
    both = jnp.stack([x_B2t[:, always], other], axis=1)
    return both.reshape(-1, *both.shape[2:])

  return jax.tree.map(of_array, tree)


def _unpaired(x_Pt):
  """Split the results of both pairs, each [B, t, ...]."""
  both = x_Pt.reshape(-1, 2, *x_Pt.shape[1:])
  return both[:, 0], both[:, 1]


def _merge_pairs(merged, results, *, is_earlier):
  """Merge the attention so far with the results of two pairs of chunks."""
  first, second = ([_halves(a)[:, at] for a in merged] for at in (FIRST, SECOND))
  pairs = map(_unpaired, results)
  (y_always, y_other), (lse_always, lse_other) = pairs
  nowhere = jnp.full_like(lse_other, -jnp.inf)
  of_first = y_other, jnp.where(is_earlier, lse_other, nowhere)
  of_second = y_other, jnp.where(is_earlier, nowhere, lse_other)
  chunks = (
    merge_attention(first, of_first),
    merge_attention(second, (y_always, lse_always), of_second),
  )
  return tuple(jnp.concatenate(both, axis=1) for both in zip(*chunks, strict=True))


def _add_pairs(sum_BT, results_Pt, always, *, is_earlier):
  """Add the results of two pairs of chunks (`pair_of_chunks`) to a sum over a device's tokens."""
  of_always, of_other = _unpaired(results_Pt)
  to_first, to_second = jnp.where(is_earlier, of_other, 0), jnp.where(is_earlier, 0, of_other)
  parts = [to_first, to_second]
  parts[always] += of_always
  return sum_BT + jnp.concatenate(parts, axis=1)
