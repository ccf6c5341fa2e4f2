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
from ats_jax.ops.attention.along_row import AlongRow, AttentionOptions, OfRows, named
from ats_jax.ops.attention.block import Tokens, merge
from ats_jax.ops.remat import ATTENTION_RESULTS
from ats_jax.sharding.apply import axis_index, num_shards, send

FIRST, SECOND = 0, 1  # the chunks of a device


@dataclasses.dataclass(frozen=True)
class Ring(AlongRow):
  """Devices keep their heads, and hand on keys and values (`mesh.context_ring`)."""

  @property
  @override
  def sinks_axis(self) -> str:
    return "heads"

  def row_multiple(self) -> int:
    """See `AlongRow`; two chunks for each device."""
    ways = num_shards("seq")
    return 2 * ways if ways > 1 else 1

  @override
  def attend(
    self,
    of_rows: OfRows,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BR: jax.Array,
    sinks_N: jax.Array | None,
    options: AttentionOptions,
  ) -> jax.Array:
    del of_rows
    q, k, v = named(q_BTNH, k_BTKH, v_BTKV)
    return ring_attention(q, k, v, segment_ids_BR, sinks_N, options)


def ring_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKV: jax.Array,
  segment_ids_BR: jax.Array,
  sinks_N: jax.Array | None,
  options: AttentionOptions,
) -> jax.Array:
  """`ops.attention.attention` of the positions of this device to those of the whole row.

  Args:
    q_BTNH: queries of consecutive positions, the devices' in order.
    k_BTKH: keys likewise; their heads divide those of the queries.
    v_BTKV: values like the keys, of any width.
    segment_ids_BR: int32, of the whole row.
    sinks_N: float32 [heads], or None.
    options: what is computed.

  Returns:
    y_BTNV like the queries, as wide as the values.

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
  kernels = {options.kernels.of("attention", slot) for slot in ("block_forward", "block_backward")}
  if kernels != {"xla"} and (options.window, options.soft_cap) != (None, None):
    name = max(kernels - {"xla"})
    raise ValueError(
      f"attention: {name} has neither a window ({options.window}) nor a soft_cap "
      f"({options.soft_cap}) in a ring, whose chunks do not follow one another. "
      "Use ops.kernels=attention=xla, or mesh.context_ring=false."
    )
  q, k, v = map(to_zigzag, (q_BTNH, k_BTKH, v_BTKV))
  return from_zigzag(_ring(q, k, v, segment_ids_BR, sinks_N, options))


def owner(chunk: int, ways: int) -> int:
  """The device that has a chunk of a row, of `2 * ways`, in zig-zag order."""
  return min(chunk, 2 * ways - 1 - chunk)


def to_zigzag(x_BT: jax.Array) -> jax.Array:
  """Device i has the chunks 2i and 2i + 1 of a row [batch, T, ...] -> i and 2n - 1 - i.

  The even chunks go to one device each, and so do the odd ones: two permutations.
  """
  ways = num_shards("seq")
  even, odd = (
    send(x, "seq", [owner(2 * i + parity, ways) for i in range(ways)])
    for parity, x in enumerate(jnp.split(x_BT, 2, axis=1))
  )
  return _in_turn(even, odd)


def from_zigzag(x_BT: jax.Array) -> jax.Array:
  """The opposite of `to_zigzag`."""
  ways, parts = num_shards("seq"), []
  in_order = jnp.split(_in_turn(*jnp.split(x_BT, 2, axis=1)), 2, axis=1)
  for parity, x in enumerate(in_order):
    home = {owner(2 * i + parity, ways): i for i in range(ways)}
    parts.append(send(x, "seq", [home[i] for i in range(ways)]))
  return jnp.concatenate(parts, axis=1)


def _in_turn(first, second):
  """Both, swapped on every second device: the first chunk of device i is even if i is."""
  is_even = axis_index("seq") % 2 == 0
  swapped = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
  return jnp.concatenate(swapped, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, options):
  """Attention in zig-zag order."""
  return _ring_forward(q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, options)[0]


def _ring_forward(q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, options):
  """Keep nothing that grows with the devices: the backward pass sends keys and values again.

  What it needs has names, so that a remat policy can keep it.
  """
  run = _chosen("block_forward", block.forward, options)
  device, here, held = axis_index("seq"), tokens_after(segment_ids_BR, 0), (k_BTKH, v_BTKV)
  y_BTNV, lse_BTN = run(q_BTNH, *held, here, here, options.rules(is_diagonal=True))
  done, coming = (y_BTNV.astype(lse_BTN.dtype), lse_BTN), _send_on(held)
  for step in range(1, num_shards("seq")):
    held, done = jax.lax.optimization_barrier((coming, done))  # no more than two at a time
    coming = _send_on(held) if step + 1 < num_shards("seq") else None
    pair = functools.partial(pair_of_chunks, is_earlier=device >= step)
    queries, keys = pair(here, SECOND), pair(tokens_after(segment_ids_BR, step), FIRST)
    found = run(
      pair(q_BTNH, SECOND), *pair(held, FIRST), queries, keys, options.rules(is_diagonal=False)
    )
    done = _joined(done, found, is_earlier=device >= step)
  y_BTNV, lse_BTN = done
  if sinks_N is not None:  # they only enlarge the softmax's denominators
    without_BTN, lse_BTN = lse_BTN, jnp.logaddexp(lse_BTN, sinks_N)
    y_BTNV *= jnp.exp(without_BTN - lse_BTN)[..., None]
  y_BTNV = checkpoint_name(y_BTNV.astype(q_BTNH.dtype), ATTENTION_RESULTS[0])
  lse_BTN = checkpoint_name(lse_BTN, ATTENTION_RESULTS[1])
  return y_BTNV, (q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, y_BTNV, lse_BTN)


def _ring_backward(options, saved, dy_BTNV):
  """Gradients of keys and values go round with them, and one step further: home."""
  # Nothing begins before the gradient is there: a first step that is also the forward pass's would
  # be made once, and kept.
  saved, dy_BTNV = jax.lax.optimization_barrier((saved, dy_BTNV))
  q_BTNH, k_BTKH, v_BTKV, segment_ids_BR, sinks_N, y_BTNV, lse_BTN = saved
  run = _chosen("block_backward", block.backward, options)
  wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
  as_wide = lambda arrays: tuple(a.astype(wide) for a in arrays)
  device, here, held = axis_index("seq"), tokens_after(segment_ids_BR, 0), (k_BTKH, v_BTKV)
  after = y_BTNV, lse_BTN, dy_BTNV
  dq_BTNH, *of_held = as_wide(
    run(q_BTNH, *held, here, here, *after, options.rules(is_diagonal=True))
  )
  coming = _send_on(held)
  for step in range(1, num_shards("seq")):
    held, dq_BTNH = jax.lax.optimization_barrier((coming, dq_BTNH))
    coming = _send_on(held) if step + 1 < num_shards("seq") else None
    of_held = _send_on(of_held)
    pair = functools.partial(pair_of_chunks, is_earlier=device >= step)
    queries, keys = pair(here, SECOND), pair(tokens_after(segment_ids_BR, step), FIRST)
    (q, *others), rules = pair((q_BTNH, *after), SECOND), options.rules(is_diagonal=False)
    dq, *dheld = as_wide(run(q, *pair(held, FIRST), queries, keys, *others, rules))
    added = functools.partial(_added, is_earlier=device >= step)
    dq_BTNH = added(dq_BTNH, dq, SECOND)
    of_held = [added(a, b, FIRST) for a, b in zip(of_held, dheld, strict=True)]
  dk_BTKH, dv_BTKV = _send_on(of_held)
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


def _chosen(slot: str, otherwise: Callable, options: AttentionOptions) -> Callable:
  return registry.kernel("attention", slot, options.kernels) or otherwise


def _send_on(arrays):
  """Keys and values, or gradients of both, to the next device along the row; the last to the first.

  As one array: of several that are sent in a step XLA lets one travel beside a kernel.
  """
  ways, (keys, _) = num_shards("seq"), arrays
  joined = send(jnp.concatenate(arrays, axis=-1), "seq", [(i + 1) % ways for i in range(ways)])
  return tuple(jnp.split(joined, [keys.shape[-1]], axis=-1))


def tokens_after(segment_ids_BR, step):
  """Which tokens a device has here after so many steps: those of the device so far before it."""
  (batch, length), ways = segment_ids_BR.shape, num_shards("seq")
  of_device = (axis_index("seq") - step) % ways
  chunks_2 = jnp.stack([of_device, 2 * ways - 1 - of_device])
  chunk = length // (2 * ways)
  ids = segment_ids_BR.reshape(batch, 2 * ways, chunk)[:, chunks_2]
  at = (chunks_2[:, None] * chunk + jnp.arange(chunk)).reshape(-1)
  return Tokens(ids.reshape(batch, -1), jnp.broadcast_to(at.astype(jnp.int32), (batch, 2 * chunk)))


def _halves(x_BT):
  batch, positions = x_BT.shape[:2]
  return x_BT.reshape(batch, 2, positions // 2, *x_BT.shape[2:])


def pair_of_chunks(tree: Any, always: int, is_earlier: jax.Array | bool) -> Any:
  """Chunks of this device, or of what it holds, as rows of a batch twice as large [2B, t, ...].

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
  """What was computed of both pairs, each [B, t, ...]."""
  both = x_Pt.reshape(-1, 2, *x_Pt.shape[1:])
  return both[:, 0], both[:, 1]


def _joined(done, found, *, is_earlier):
  """What is known of the queries, with what was found of two pairs of chunks."""
  first, second = ([_halves(a)[:, at] for a in done] for at in (FIRST, SECOND))
  pairs = map(_unpaired, found)
  (y_always, y_other), (lse_always, lse_other) = pairs
  nowhere = jnp.full_like(lse_other, -jnp.inf)
  of_first = y_other, jnp.where(is_earlier, lse_other, nowhere)
  of_second = y_other, jnp.where(is_earlier, nowhere, lse_other)
  chunks = merge(first, of_first), merge(second, (y_always, lse_always), of_second)
  return tuple(jnp.concatenate(both, axis=1) for both in zip(*chunks, strict=True))


def _added(sum_BT, found_Pt, always, *, is_earlier):
  """A sum over a device's tokens, with shares of two pairs of chunks (`pair_of_chunks`)."""
  of_always, of_other = _unpaired(found_Pt)
  to_first, to_second = jnp.where(is_earlier, of_other, 0), jnp.where(is_earlier, 0, of_other)
  parts = [to_first, to_second]
  parts[always] += of_always
  return sum_BT + jnp.concatenate(parts, axis=1)
