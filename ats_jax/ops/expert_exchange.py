"""Expert parallelism: tokens go to the devices of their experts and back, by two exchanges.

For local arrays: call these inside an island. Each exchange has room for `factor` times the rows
that a device receives on average. Rows that do not fit are computed in further passes with the same
buffers, so that memory is bounded and nothing is dropped. `allgather` suits the links within a
host; `hierarchical` sends a token once to each host and gathers it there, as links between hosts
are several times slower (docs/internals/adr/0039-expert-exchange.md).

Letters: N tokens of a device, A of all devices along the axis, K choices of a token, M rows,
D d_model, E experts of a device, X of all devices, S devices that send, R devices that receive,
H hosts, C hosts of a token, P passes.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops.dispatch import place_in_bins, slot_window, sort_by_expert, sum_rows, take_rows
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.apply import (
  Groups,
  all_gather,
  all_sum,
  all_to_all,
  axis_index,
  between_hosts,
  mesh_axes,
  num_hosts,
  num_shards,
  reduce_scatter,
  within_hosts,
)


class ExpertCompute(NamedTuple):
  """The computation of experts, and the size of its buffers; static.

  Attributes:
    compute: (rows [M, D] sorted by expert, sizes [E], weights) -> [M, D]. It closes over no array.
    num_local: the number of experts of a device.
    factor: rows that a buffer holds, over the mean.
    kernels: the chosen implementations.
    num_groups: the number of groups of neighbouring experts, all of one size.
    top_groups: the number of these groups that a token's choices are in.
  """

  compute: Callable[[jax.Array, jax.Array, Any], jax.Array]
  num_local: int
  factor: float
  kernels: Kernels
  num_groups: int = 1
  top_groups: int = 1


def run_experts(
  x_ND: jax.Array,
  expert_NK: jax.Array,
  weight_NK: jax.Array,
  weights: Any,
  experts: ExpertCompute,
  exchange: str,
) -> tuple[jax.Array, jax.Array]:
  """`y[n] = sum_k weight[n, k] * expert[n, k](x[n])`, the experts spread over devices.

  Args:
    x_ND: the tokens of this device.
    expert_NK: int32; device i has the experts from i * num_local. The number of all experts = none.
    weight_NK: float32 weight of each choice.
    weights: the weights of this device's experts, a pytree.
    experts: what the experts compute.
    exchange: a key of EXCHANGES; it has no effect where one device has all experts, or all
      devices have the same tokens.

  Returns:
    [N, D]; int32, this device's number of choices that had to wait for a further pass.
  """
  if num_shards("experts") > 1:
    have_own_tokens = set(mesh_axes("experts")) & set(mesh_axes("batch"))
    run = EXCHANGES[exchange] if have_own_tokens else _nothing_sent
    return run(x_ND, expert_NK, weight_NK, weights, experts)
  places, sizes_E = sort_by_expert(expert_NK, experts.num_local, experts.kernels)
  y_MD = experts.compute(take_rows(x_ND, places, experts.kernels), sizes_E, weights)
  return sum_rows(y_MD, weight_NK, places, experts.kernels), jnp.zeros((), jnp.int32)


def _nothing_sent(x_ND, expert_NK, weight_NK, weights, experts):
  """All devices have the same tokens: each sums its experts' results, and the sums are added."""
  (places, sizes_E), _ = _sort_local(expert_NK, experts)
  y_MD = experts.compute(take_rows(x_ND, places, experts.kernels), sizes_E, weights)
  y_ND = sum_rows(y_MD, weight_NK, places, experts.kernels)
  return all_sum(y_ND, "experts"), jnp.zeros((), jnp.int32)


def _allgather(x_ND, expert_NK, weight_NK, weights, experts):
  """All-gather all tokens; each device sums its experts' results, which are reduce-scattered."""
  rows, most = _rows_per_pass(expert_NK, experts)
  expert_AK = all_gather(expert_NK, "experts")
  devices = jnp.arange(num_shards("experts"))
  received_R = jnp.sum(expert_AK[..., None] // experts.num_local == devices, axis=(0, 1))
  sorted_here, here = _sort_local(expert_AK, experts)
  run_pass = functools.partial(_gathered_pass, experts=experts, rows=rows)
  fullest = jnp.max(received_R)
  y_ND = _in_passes(run_pass, rows, most, fullest, sorted_here, x_ND, weight_NK, weights)
  return y_ND, jnp.maximum(here - rows, 0)


def _sort_local(expert_AK, experts):
  """Sort the rows of this device's experts, and count them."""
  local_AK = expert_AK - axis_index("experts") * experts.num_local
  is_here_AK = (local_AK >= 0) & (local_AK < experts.num_local)
  local_AK = jnp.where(is_here_AK, local_AK, experts.num_local)
  sorted_here = sort_by_expert(local_AK, experts.num_local, experts.kernels)
  return sorted_here, jnp.sum(sorted_here[1])


def _gathered_pass(
  start, sorted_here, x_ND, weight_NK, weights, *, experts, rows, groups: Groups | None = None
):
  """All-gather tokens within a group, compute, and reduce-scatter each token's sum."""
  places, sizes_E = sorted_here
  here, kernels = slot_window(places, 1, start, rows), experts.kernels
  ends_E = jnp.clip(jnp.cumsum(sizes_E) - start, 0, rows)
  x_AD, weight_AK = (all_gather(a, "experts", groups=groups) for a in (x_ND, weight_NK))
  rows_MD = take_rows(x_AD, here, kernels)
  y_MD = experts.compute(rows_MD, jnp.diff(ends_E, prepend=0), weights)
  return reduce_scatter(sum_rows(y_MD, weight_AK, here, kernels), "experts", groups=groups)


def _hierarchical(x_ND, expert_NK, weight_NK, weights, experts):
  """Send each token once to each host with one of its experts, and gather it within the host.

  Between hosts it goes to the device that has the same place there, and the sum of the host's
  shares comes back from that device. DeepSpeed-MoE (arXiv:2201.05596) and Tutel (arXiv:2206.03382)
  exchange choices in two such steps, DeepSeek-V3 (arXiv:2412.19437, section 3.2.2) tokens, so that
  none crosses to a host twice.
  """
  hosts, ways, (tokens, choices) = num_hosts(), num_shards("experts"), expert_NK.shape
  if hosts == 1:
    return _allgather(x_ND, expert_NK, weight_NK, weights, experts)
  rows = host_capacity(
    tokens, choices, hosts, experts.factor, experts.num_groups, experts.top_groups
  )
  room, _ = _rows_per_pass(expert_NK, experts)
  host_NK = expert_NK // (experts.num_local * ways // hosts)
  host_NC = _distinct_hosts(host_NK, hosts)
  places = place_in_bins(host_NC, hosts, tokens)
  pass_NC = places.slot_NK % tokens // rows
  pass_NK = jnp.max(jnp.where(host_NK[..., None] == host_NC[:, None], pass_NC[:, None], 0), axis=2)
  # Rows that each device gets in each pass: all have to know how many passes each of them makes.
  passes, devices = jnp.arange(-(-tokens // rows))[:, None], jnp.arange(ways)
  device_NK = (expert_NK // experts.num_local)[..., None, None]
  goes_NKPX = (pass_NK[..., None, None] == passes) & (device_NK == devices)
  received_PX = all_sum(jnp.sum(goes_NKPX, axis=(0, 1)), "experts")
  needed = jnp.sum(jnp.any(received_PX > 0, axis=1)) * rows
  routing = places, expert_NK, jnp.max(received_PX, axis=1)
  run_pass = functools.partial(_host_pass, experts=experts, rows=rows, room=room)
  y_ND = _in_passes(run_pass, rows, tokens, needed, routing, x_ND, weight_NK, weights)
  beyond = jnp.maximum(received_PX[0, axis_index("experts")] - room, 0)
  return y_ND, jnp.sum(pass_NK > 0) + beyond


def _host_pass(start, routing, x_ND, weight_NK, weights, *, experts, rows, room):
  """Send up to `rows` tokens from each device to each host; compute `room` rows at a time."""
  (places, expert_NK, fullest_P), kernels, hosts = routing, experts.kernels, num_hosts()
  across, inside, num_experts = (
    between_hosts("experts"),
    within_hosts("experts"),
    _num_all_experts(experts),
  )
  here = slot_window(places, hosts, start, rows)
  expert_MK = expert_NK.at[here.source_M].get(mode="fill", fill_value=num_experts)
  sent = take_rows(x_ND, here, kernels), expert_MK, take_rows(weight_NK, here)
  x_MD, expert_MK, weight_MK = (all_to_all(a, "experts", groups=across) for a in sent)
  expert_AK = all_gather(expert_MK, "experts", groups=inside)
  sorted_here, _ = _sort_local(expert_AK, experts)
  most = expert_AK.shape[0] * min(expert_AK.shape[1], experts.num_local)
  room = min(room, most)
  run_pass = functools.partial(_gathered_pass, experts=experts, rows=room, groups=inside)
  needed = fullest_P[start // rows]
  y_MD = _in_passes(run_pass, room, most, needed, sorted_here, x_MD, weight_MK, weights)
  y_MD = all_to_all(y_MD, "experts", groups=across)
  return sum_rows(y_MD, jnp.ones(here.slot_NK.shape, weight_NK.dtype), here, kernels)


def host_capacity(
  tokens: int, choices: int, hosts: int, factor: float, num_groups: int = 1, top_groups: int = 1
) -> int:
  """The tokens that a device can send to each host in one pass: `factor` times the mean, or all.

  A token goes to no more hosts than it has choices, and than the groups of experts that it may use
  lie on. That many are taken for the mean.

  Args:
    tokens: the number of tokens of a device.
    choices: the number of choices of a token.
    hosts: the number of hosts that the experts are spread over.
    factor: the size of the buffer over the mean.
    num_groups: the number of groups of neighbouring experts.
    top_groups: the number of groups that a token's choices are in.
  """
  astride = hosts % num_groups and num_groups % hosts  # a group may begin and end within hosts
  of_group = -(-hosts // num_groups) + (1 if astride else 0)
  reached = min(choices, hosts, top_groups * of_group)
  return min(tokens, _round_up(factor * tokens * reached / hosts))


def _distinct_hosts(host_NK, hosts):
  """List the distinct hosts of each token, filled up with `hosts`."""
  sorted_NK = jnp.sort(host_NK, axis=1)
  is_again_NK = jnp.diff(sorted_NK, axis=1, prepend=-1) == 0
  return jnp.sort(jnp.where(is_again_NK, hosts, sorted_NK), axis=1)[:, :hosts]


EXCHANGES = {
  "allgather": _allgather,
  "hierarchical": _hierarchical,
}


def _num_all_experts(experts):
  return experts.num_local * num_shards("experts")


def _rows_per_pass(expert_NK, experts):
  """The rows of a device in one pass (`factor` times the mean), and the most it can receive."""
  tokens, choices = expert_NK.shape
  most = num_shards("experts") * tokens * min(choices, experts.num_local)
  return min(most, _round_up(experts.factor * tokens * choices)), most


def _round_up(rows: float) -> int:
  return max(1, math.ceil(round(rows, 6)))


def _in_passes(run_pass, rows, most, needed, routing, *parts):
  """Sum `run_pass(start, routing, *parts)` over windows of `rows` rows.

  Args:
    run_pass: computes the window that begins at row `start`.
    rows: the number of rows of a pass.
    most: the largest possible number of rows.
    needed: the number of rows of the device with the most; the same value on all devices.
    routing: a pytree of integers.
    parts: arrays that get gradients.
  """
  if rows == most:
    return run_pass(0, routing, *parts)
  return _sum_of_passes(run_pass, rows, -(-needed // rows), routing, *parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_of_passes(run_pass, rows, passes, routing, *parts):
  add = lambda p, y_ND: y_ND + _later_pass(run_pass, rows, p, routing, parts)[0]
  return jax.lax.fori_loop(1, passes, add, run_pass(0, routing, *parts))


def _forward(run_pass, rows, passes, routing, *parts):
  y_ND, pullback = jax.vjp(functools.partial(run_pass, 0, routing), *parts)
  add = lambda p, y_ND: y_ND + _later_pass(run_pass, rows, p, routing, parts)[0]
  return jax.lax.fori_loop(1, passes, add, y_ND), (pullback, passes, routing, parts)


def _backward(run_pass, rows, residuals, dy_ND):
  """Further passes are computed again, so that memory does not depend on how many there are."""
  pullback, passes, routing, parts = residuals
  first, structure = jax.tree.flatten(pullback(dy_ND))
  is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in first]  # codes of weights are not

  def add(p, gradients):
    _, of_pass = _later_pass(run_pass, rows, p, routing, parts)
    more = jax.tree.leaves(of_pass(jax.lax.optimization_barrier((p, dy_ND))[1]))
    return list(map(jnp.add, gradients, itertools.compress(more, is_float)))

  summed = iter(jax.lax.fori_loop(1, passes, add, list(itertools.compress(first, is_float))))
  gradients = [next(summed) if of else x for x, of in zip(first, is_float, strict=True)]
  return None, None, *structure.unflatten(gradients)


_sum_of_passes.defvjp(_forward, _backward)


def _later_pass(run_pass, rows, p, routing, parts):
  """Run a further pass inside a loop, which most steps never enter; return it with its pullback."""
  # Or XLA moves what all passes have in common, such as the gather, in front of the loop.
  p, routing, parts = jax.lax.optimization_barrier((p, routing, parts))
  return jax.vjp(functools.partial(run_pass, p * rows, routing), *parts)
