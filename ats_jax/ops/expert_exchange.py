"""Tokens to the devices that hold their experts, and back: three ways to the same result.

For local arrays: call these inside an island. Each way has room for `factor` times the rows that a
device receives on average. Rows that do not fit are computed in further passes through the same
room, so that memory is bounded and nothing is dropped. Which way is for what:
docs/internals/adr/0039-expert-exchange.md, 0047-hierarchical-exchange.md.

Letters: N tokens of a device, A of all devices along the axis, K choices of a token, M rows,
D d_model, E experts of a device, X of all devices, S devices that send, R devices that receive,
H hosts, C hosts of a token, P passes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops.dispatch import place_in_bins, sort_by_expert, sum_rows, take_rows, window
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.apply import (
  Groups,
  all_max,
  all_sum,
  axis_index,
  between_hosts,
  exchange,
  gather_blocks,
  num_hosts,
  num_shards,
  sum_blocks,
  within_hosts,
)


class Experts(NamedTuple):
  """What is computed with the rows, and in how much room; static.

  Attributes:
    compute: (rows [M, D] sorted by expert, sizes [E], weights) -> [M, D]. It closes over no array.
    num_local: experts of a device.
    factor: rows that there is room for, over the mean.
    kernels: what runs.
    num_groups: of neighbouring experts, all of one size.
    top_groups: of these, those that a token's choices are in.
  """

  compute: Callable[[jax.Array, jax.Array, Any], jax.Array]
  num_local: int
  factor: float
  kernels: Kernels
  num_groups: int = 1
  top_groups: int = 1


def through_experts(
  x_ND: jax.Array,
  expert_NK: jax.Array,
  weight_NK: jax.Array,
  weights: Any,
  experts: Experts,
  how: str,
) -> tuple[jax.Array, jax.Array]:
  """`y[n] = sum_k weight[n, k] * expert[n, k](x[n])`, the experts spread over devices.

  Args:
    x_ND: the tokens of this device.
    expert_NK: int32; device i has the experts from i * num_local. The number of all = nowhere.
    weight_NK: float32.
    weights: of this device's experts, a pytree.
    experts: what they do.
    how: one of WAYS; where the experts are not spread, it makes no difference.

  Returns:
    [N, D]; int32, the choices that had to wait for a further pass, on this device.
  """
  if num_shards("experts") > 1:
    return WAYS[how](x_ND, expert_NK, weight_NK, weights, experts)
  places, sizes_E = sort_by_expert(expert_NK, experts.num_local, experts.kernels)
  y_MD = experts.compute(take_rows(x_ND, places, experts.kernels), sizes_E, weights)
  return sum_rows(y_MD, weight_NK, places, experts.kernels), jnp.zeros((), jnp.int32)


def _allgather(x_ND, expert_NK, weight_NK, weights, experts):
  """All tokens to all devices. Each adds up its experts' shares, then the shares are summed."""
  rows, most = _room(expert_NK, experts)
  expert_AK = gather_blocks(expert_NK, "experts")
  devices = jnp.arange(num_shards("experts"))
  received_R = jnp.sum(expert_AK[..., None] // experts.num_local == devices, axis=(0, 1))
  sorted_here, here = _sorted_here(expert_AK, experts)
  one = functools.partial(_gathered_pass, experts=experts, rows=rows)
  y_ND = _in_passes(one, rows, most, jnp.max(received_R), sorted_here, x_ND, weight_NK, weights)
  return y_ND, jnp.maximum(here - rows, 0)


def _sorted_here(expert_AK, experts):
  """Where the rows of this device's experts are, and how many there are."""
  local_AK = expert_AK - axis_index("experts") * experts.num_local
  is_here_AK = (local_AK >= 0) & (local_AK < experts.num_local)
  local_AK = jnp.where(is_here_AK, local_AK, experts.num_local)
  sorted_here = sort_by_expert(local_AK, experts.num_local, experts.kernels)
  return sorted_here, jnp.sum(sorted_here[1])


def _gathered_pass(
  start, sorted_here, x_ND, weight_NK, weights, *, experts, rows, groups: Groups | None = None
):
  """Tokens of the devices of a group to all of them, and each token's sum back to its own."""
  places, sizes_E = sorted_here
  here, kernels = window(places, 1, start, rows), experts.kernels
  ends_E = jnp.clip(jnp.cumsum(sizes_E) - start, 0, rows)
  x_AD, weight_AK = (gather_blocks(a, "experts", groups=groups) for a in (x_ND, weight_NK))
  rows_MD = take_rows(x_AD, here, kernels)
  y_MD = experts.compute(rows_MD, jnp.diff(ends_E, prepend=0), weights)
  return sum_blocks(sum_rows(y_MD, weight_AK, here, kernels), "experts", groups=groups)


def _hierarchical(x_ND, expert_NK, weight_NK, weights, experts):
  """Each token once to each host that has experts of it, and there to all devices.

  Between hosts it goes to the device that has the same place there, and the sum of the host's
  shares comes back from that device. DeepSpeed-MoE (arXiv:2201.05596) and Tutel (arXiv:2206.03382)
  exchange choices in two such steps, DeepSeek-V3 (arXiv:2412.19437, section 3.2.2) tokens, so that
  none crosses to a host twice.
  """
  hosts, ways, (tokens, choices) = num_hosts(), num_shards("experts"), expert_NK.shape
  if hosts == 1:
    return _allgather(x_ND, expert_NK, weight_NK, weights, experts)
  rows = host_room(tokens, choices, hosts, experts.factor, experts.num_groups, experts.top_groups)
  room, _ = _room(expert_NK, experts)
  host_NK = expert_NK // (experts.num_local * ways // hosts)
  host_NC = _without_repeats(host_NK, hosts)
  places = place_in_bins(host_NC, hosts, tokens)
  pass_NC = places.slot_NK % tokens // rows
  pass_NK = jnp.max(jnp.where(host_NK[..., None] == host_NC[:, None], pass_NC[:, None], 0), axis=2)
  # Rows that each device gets in each pass: all have to know how many passes each of them makes.
  passes, devices = jnp.arange(-(-tokens // rows))[:, None], jnp.arange(ways)
  device_NK = (expert_NK // experts.num_local)[..., None, None]
  goes_NKPX = (pass_NK[..., None, None] == passes) & (device_NK == devices)
  received_PX = all_sum(jnp.sum(goes_NKPX, axis=(0, 1)), "experts")
  needed = jnp.sum(jnp.any(received_PX > 0, axis=1)) * rows
  whole = places, expert_NK, jnp.max(received_PX, axis=1)
  one = functools.partial(_host_pass, experts=experts, rows=rows, room=room)
  y_ND = _in_passes(one, rows, tokens, needed, whole, x_ND, weight_NK, weights)
  beyond = jnp.maximum(received_PX[0, axis_index("experts")] - room, 0)
  return y_ND, jnp.sum(pass_NK > 0) + beyond


def _host_pass(start, whole, x_ND, weight_NK, weights, *, experts, rows, room):
  """Up to `rows` tokens from each device to each host, computed there `room` rows at a time."""
  (places, expert_NK, fullest_P), kernels, hosts = whole, experts.kernels, num_hosts()
  across, inside, num_experts = between_hosts("experts"), within_hosts("experts"), _all(experts)
  here = window(places, hosts, start, rows)
  expert_MK = expert_NK.at[here.source_M].get(mode="fill", fill_value=num_experts)
  sent = take_rows(x_ND, here, kernels), expert_MK, take_rows(weight_NK, here)
  x_MD, expert_MK, weight_MK = (exchange(a, "experts", groups=across) for a in sent)
  expert_AK = gather_blocks(expert_MK, "experts", groups=inside)
  sorted_here, _ = _sorted_here(expert_AK, experts)
  most = expert_AK.shape[0] * min(expert_AK.shape[1], experts.num_local)
  room = min(room, most)
  one = functools.partial(_gathered_pass, experts=experts, rows=room, groups=inside)
  needed = fullest_P[start // rows]
  y_MD = _in_passes(one, room, most, needed, sorted_here, x_MD, weight_MK, weights)
  y_MD = exchange(y_MD, "experts", groups=across)
  return sum_rows(y_MD, jnp.ones(here.slot_NK.shape, weight_NK.dtype), here, kernels)


def host_room(
  tokens: int, choices: int, hosts: int, factor: float, num_groups: int = 1, top_groups: int = 1
) -> int:
  """Tokens that a device can send to each host at a time: `factor` times the mean, or all.

  A token goes to no more hosts than it has choices, and than the groups of experts that it may use
  lie on. That many are taken for the mean.

  Args:
    tokens: of a device.
    choices: of a token.
    hosts: that the experts are spread over.
    factor: of the room.
    num_groups: of neighbouring experts.
    top_groups: groups of a token.
  """
  astride = hosts % num_groups and num_groups % hosts  # a group may begin and end within hosts
  of_group = -(-hosts // num_groups) + (1 if astride else 0)
  reached = min(choices, hosts, top_groups * of_group)
  return min(tokens, _at_least(factor * tokens * reached / hosts))


def _without_repeats(host_NK, hosts):
  """The hosts of each token, each once; `hosts` in the places that are left."""
  sorted_NK = jnp.sort(host_NK, axis=1)
  is_again_NK = jnp.diff(sorted_NK, axis=1, prepend=-1) == 0
  return jnp.sort(jnp.where(is_again_NK, hosts, sorted_NK), axis=1)[:, :hosts]


def _bins(x_ND, expert_NK, weight_NK, weights, experts):
  """Each choice's row to its device alone, in blocks of one size for each pair of devices."""
  ways, (tokens, choices) = num_shards("experts"), expert_NK.shape
  most = tokens * min(choices, experts.num_local)
  rows = min(most, _at_least(experts.factor * tokens * choices / ways))
  places = place_in_bins(expert_NK // experts.num_local, ways, most)
  sizes_R = jnp.sum(places.choice_M.reshape(ways, most) < expert_NK.size, axis=1)
  one = functools.partial(_bins_pass, experts=experts, rows=rows)
  whole = places, expert_NK % experts.num_local
  fullest = all_max(jnp.max(sizes_R), "experts")
  y_ND = _in_passes(one, rows, most, fullest, whole, x_ND, weight_NK, weights)
  return y_ND, jnp.sum(jnp.maximum(sizes_R - rows, 0))


def _bins_pass(start, whole, x_ND, weight_NK, weights, *, experts, rows):
  (places, local_NK), kernels = whole, experts.kernels
  here = window(places, num_shards("experts"), start, rows)
  sent_M = local_NK.reshape(-1).at[here.choice_M].get(mode="fill", fill_value=experts.num_local)
  sent = sent_M, take_rows(x_ND, here, kernels)
  received_M, rows_MD = (exchange(a, "experts") for a in sent)
  inner, sizes_E = sort_by_expert(received_M[:, None], experts.num_local, kernels)
  y_MD = experts.compute(take_rows(rows_MD, inner, kernels), sizes_E, weights)
  ones = jnp.ones(inner.slot_NK.shape, weight_NK.dtype)
  y_MD = exchange(sum_rows(y_MD, ones, inner, kernels), "experts")
  return sum_rows(y_MD, weight_NK, here, kernels)


WAYS = {
  "allgather": _allgather,
  "bins": _bins,
  "hierarchical": _hierarchical,
}


def _all(experts):
  return experts.num_local * num_shards("experts")


def _room(expert_NK, experts):
  """Rows of a device at a time: `factor` times the mean; and the most that it can receive."""
  tokens, choices = expert_NK.shape
  most = num_shards("experts") * tokens * min(choices, experts.num_local)
  return min(most, _at_least(experts.factor * tokens * choices)), most


def _at_least(rows: float) -> int:
  return max(1, math.ceil(round(rows, 6)))


def _in_passes(one, rows, most, needed, whole, *parts):
  """The sum of `one(start, whole, *parts)` over windows of `rows` rows.

  Args:
    one: a pass that begins at row `start`. Its collectives are between devices along the experts.
    rows: of a pass.
    most: rows that can come at all.
    needed: rows that have come to the device with the most: on all devices the same.
    whole: integers, a pytree.
    parts: what has gradients.
  """
  if rows == most:
    return one(0, whole, *parts)
  return _sum_of_passes(one, rows, -(-needed // rows), whole, *parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_of_passes(one, rows, passes, whole, *parts):
  add = lambda p, y_ND: y_ND + _later(one, rows, p, whole, parts)[0]
  return jax.lax.fori_loop(1, passes, add, one(0, whole, *parts))


def _forward(one, rows, passes, whole, *parts):
  y_ND, pullback = jax.vjp(functools.partial(one, 0, whole), *parts)
  add = lambda p, y_ND: y_ND + _later(one, rows, p, whole, parts)[0]
  return jax.lax.fori_loop(1, passes, add, y_ND), (pullback, passes, whole, parts)


def _backward(one, rows, residuals, dy_ND):
  """Further passes are computed again, so that memory does not depend on how many there are."""
  pullback, passes, whole, parts = residuals

  def add(p, gradients):
    _, of_pass = _later(one, rows, p, whole, parts)
    return jax.tree.map(jnp.add, gradients, of_pass(jax.lax.optimization_barrier((p, dy_ND))[1]))

  return None, None, *jax.lax.fori_loop(1, passes, add, pullback(dy_ND))


_sum_of_passes.defvjp(_forward, _backward)


def _later(one, rows, p, whole, parts):
  """A pass in a loop, which most steps never enter, and its pullback."""
  # Or XLA moves what all passes have in common, such as the gather, in front of the loop.
  p, whole, parts = jax.lax.optimization_barrier((p, whole, parts))
  return jax.vjp(functools.partial(one, p * rows, whole), *parts)
