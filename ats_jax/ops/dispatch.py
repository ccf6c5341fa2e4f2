"""Dispatch of rows to slots and back by gathers only; the backward pass has no scatter either.

Letters: N tokens, K choices of a token, M = slots that rows are put in, D d_model, E experts.
Local arrays throughout: call these inside an island.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from kernels_triton.plan import FEW_ROWS


class Places(NamedTuple):
  """A partial one-to-one map between choices (n, k) and slots m, both ways.

  Attributes:
    source_M: int32 token in each slot; N = none.
    choice_M: int32 choice n * K + k in each slot; N * K = none.
    slot_NK: int32 slot of each choice; M = none.
  """

  source_M: jax.Array
  choice_M: jax.Array
  slot_NK: jax.Array


def sort_by_expert(
  expert_NK: jax.Array, num_experts: int, kernels: Kernels = XLA
) -> tuple[Places, jax.Array]:
  """Give every choice a slot, grouped by expert, in the order of tokens within a group.

  Args:
    expert_NK: int32 expert of each choice; `num_experts` = none.
    num_experts: the number of experts E.
    kernels: the chosen implementations.

  Returns:
    Places with M = N * K, of which those past the last group are empty; int32 [E] group sizes.
  """
  kernel = _kernel("sort_by_expert", "forward", kernels, expert_NK, experts=num_experts)
  if kernel is not None:
    *places, sizes_E = kernel(expert_NK, num_experts=num_experts)
    return Places(*places), sizes_E
  tokens, choices = expert_NK.shape
  flat_M = expert_NK.reshape(-1)
  order_M = jnp.argsort(flat_M, stable=True).astype(jnp.int32)
  slot_M = jnp.argsort(order_M).astype(jnp.int32)
  ends_E = jnp.searchsorted(flat_M[order_M], jnp.arange(num_experts), side="right")
  sizes_E = jnp.diff(ends_E, prepend=0).astype(jnp.int32)
  used_M = jnp.arange(flat_M.size) < ends_E[-1]
  places = Places(
    source_M=jnp.where(used_M, order_M // choices, tokens),
    choice_M=jnp.where(used_M, order_M, flat_M.size),
    slot_NK=jnp.where(flat_M < num_experts, slot_M, flat_M.size).reshape(expert_NK.shape),
  )
  return places, sizes_E


def place_in_bins(
  bin_NK: jax.Array, num_bins: int, capacity: int, priority_NK: jax.Array | None = None
) -> Places:
  """Give choices the slots of bins of one size; choices that find their bin full get none.

  Args:
    bin_NK: int32 bin of each choice; `num_bins` = none.
    num_bins: the number of bins.
    capacity: the number of slots of each bin.
    priority_NK: choices with the highest priority come first; None = in the order of tokens.

  Returns:
    Places with M = num_bins * capacity; bin b has the slots from b * capacity.
  """
  flat_M = bin_NK.reshape(-1)
  num_choices, num_slots = flat_M.size, num_bins * capacity
  if priority_NK is None:
    order_M = jnp.argsort(flat_M, stable=True)
  else:
    order_M = jnp.lexsort((-priority_NK.reshape(-1), flat_M))
  starts = jnp.searchsorted(flat_M[order_M], jnp.arange(num_bins + 1), side="left")
  rank_M = jnp.argsort(order_M) - starts[flat_M]
  kept_M = (rank_M < capacity) & (flat_M < num_bins)
  slot_M = jnp.where(kept_M, flat_M * capacity + rank_M, num_slots)
  sorted_at = starts[:-1, None] + jnp.arange(capacity)
  filled = sorted_at < starts[1:, None]
  choice_S = jnp.where(filled, order_M[jnp.minimum(sorted_at, num_choices - 1)], num_choices)
  choice_S = choice_S.reshape(-1).astype(jnp.int32)
  return Places(
    source_M=choice_S // bin_NK.shape[1],
    choice_M=choice_S,
    slot_NK=slot_M.reshape(bin_NK.shape).astype(jnp.int32),
  )


def slot_window(places: Places, num_bins: int, start: int | jax.Array, rows: int) -> Places:
  """Cut the slots from `start` to `start + rows` out of each bin, as bins of that size.

  Args:
    places: bins of one size, one after another; the result of `sort_by_expert` is one bin.
    num_bins: the number of bins.
    start: the first slot of each bin to take.
    rows: the slots of each bin in the result; those past the end of a bin are empty.

  Returns:
    Places with M = num_bins * rows. Choices outside the window have no slot.
  """
  capacity = places.source_M.size // num_bins

  def cut(a_M, none):
    a_BC = jnp.pad(a_M.reshape(num_bins, capacity), ((0, 0), (0, rows)), constant_values=none)
    return jax.lax.dynamic_slice_in_dim(a_BC, start, rows, axis=1).reshape(-1)

  bin_NK, place_NK = places.slot_NK // capacity, places.slot_NK % capacity - start
  inside_NK = (place_NK >= 0) & (place_NK < rows)  # without a slot, bin_NK is num_bins
  return Places(
    source_M=cut(places.source_M, places.slot_NK.shape[0]),
    choice_M=cut(places.choice_M, places.slot_NK.size),
    slot_NK=jnp.where(inside_NK, bin_NK * rows + place_NK, num_bins * rows),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take_rows(x_ND: jax.Array, places: Places, kernels: Kernels = XLA) -> jax.Array:
  """`out[m] = x[source[m]]`, zero in empty slots: [N, D] -> [M, D]."""
  kernel = _kernel("take_rows", _forward_slot(places), kernels, places.slot_NK, width=x_ND.shape[1])
  if kernel is not None:
    return kernel(x_ND, places.source_M)
  return _gather_or_zero(x_ND, places.source_M)


def _take_forward(x_ND, places, kernels):
  return take_rows(x_ND, places, kernels), places


def _take_backward(kernels, places, dout_MD):
  kernel = _kernel("take_rows", "backward", kernels, places.slot_NK, width=dout_MD.shape[1])
  if kernel is not None:
    return kernel(dout_MD, places.slot_NK), None
  return _gather_or_zero(dout_MD, places.slot_NK).sum(axis=1).astype(dout_MD.dtype), None


take_rows.defvjp(_take_forward, _take_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def sum_rows(
  y_MD: jax.Array, weight_NK: jax.Array, places: Places, kernels: Kernels = XLA
) -> jax.Array:
  """`out[n] = sum_k weight[n, k] * y[slot[n, k]]`; a choice without a slot adds nothing.

  Args:
    y_MD: rows [slots, d_model].
    weight_NK: float32 weight of each choice.
    places: the slot of each choice.
    kernels: the chosen implementations.

  Returns:
    [tokens, d_model] in the dtype of `y_MD`, summed in float32.
  """
  kernel = _kernel("sum_rows", _forward_slot(places), kernels, places.slot_NK, width=y_MD.shape[1])
  if kernel is not None:
    return kernel(y_MD, weight_NK, places.slot_NK)
  rows_NKD = _gather_or_zero(y_MD, places.slot_NK)
  return jnp.einsum("NKD,NK->ND", rows_NKD, weight_NK).astype(y_MD.dtype)


def _sum_forward(y_MD, weight_NK, places, kernels):
  return sum_rows(y_MD, weight_NK, places, kernels), (y_MD, weight_NK, places)


def _sum_backward(kernels, residuals, dout_ND):
  y_MD, weight_NK, places = residuals
  kernel = _kernel("sum_rows", "backward", kernels, places.slot_NK, width=y_MD.shape[1])
  if kernel is not None:
    dy_MD, dweight_NK = kernel(y_MD, weight_NK, *places, dout_ND)
    return dy_MD, dweight_NK, None
  dout_MD = _gather_or_zero(dout_ND, places.source_M)
  weight_M = _gather_or_zero(weight_NK.reshape(-1), places.choice_M)
  dy_MD = (dout_MD * weight_M[:, None]).astype(y_MD.dtype)
  dweight_M = jnp.einsum("MD,MD->M", dout_MD.astype(weight_M.dtype), y_MD.astype(weight_M.dtype))
  return dy_MD, _gather_or_zero(dweight_M, places.slot_NK), None


sum_rows.defvjp(_sum_forward, _sum_backward)


def _forward_slot(places):
  return "few_rows" if places.slot_NK.size <= FEW_ROWS else "forward"


def _kernel(op, slot, kernels, a_NK, **widths):
  return registry.kernel(op, slot, kernels, rows=a_NK.shape[0], choices=a_NK.shape[1], **widths)


def _gather_or_zero(x: jax.Array, index: jax.Array) -> jax.Array:
  """`x[index]`, zero where the index is past the end."""
  return x.at[index].get(mode="fill", fill_value=0)
