"""Rows to the slots of their experts and back; gathers only, backward too.

Letters: N tokens, K choices of a token (1 to 8), M slots, D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, expect_packs, like

MAX_CHOICES = 8


class Places(NamedTuple):
  """A partial one-to-one map between choices (n, k) and slots m, both ways.

  Attributes:
    source_M: int32 token in each slot; N = none.
    choice_M: int32 which choice, n * K + k, is in each slot; N * K = none.
    slot_NK: int32 slot of each choice; M = none.
  """

  source_M: jax.Array
  choice_M: jax.Array
  slot_NK: jax.Array


@jax.custom_vjp
def take_rows(x_ND: jax.Array, places: Places) -> jax.Array:
  """`out[m] = x[source[m]]`, zero in empty slots.

  Floor in bytes: 2 D (N + M) + 4 M forward, with K choices a token; backward the same.

  Args:
    x_ND: bfloat16 [tokens, width]; width a multiple of 8.
    places: which row goes where.

  Returns:
    bfloat16 [slots, width]. Its gradient is a sum over each token's choices, added in float32.

  Raises:
    ValueError: another dtype or shape.
  """
  _check("take_rows", places, x_ND=x_ND)
  return gather_rows(x_ND, places.source_M)


def _take_forward(x_ND, places):
  return take_rows(x_ND, places), places


def _take_backward(places, dout_MD):
  return add_rows(dout_MD, places.slot_NK), None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def sum_rows(y_MD: jax.Array, weight_NK: jax.Array, places: Places) -> jax.Array:
  """`out[n] = sum_k weight[n, k] * y[slot[n, k]]`, added in float32.

  A choice without a slot adds nothing. Floor in bytes: 2 D (M + N) + 8 N K forward, 2 D (2 M + N)
  + 12 N K backward.

  Args:
    y_MD: bfloat16 [slots, width]; width a multiple of 8.
    weight_NK: float32 [tokens, choices].
    places: which row is whose.

  Returns:
    bfloat16 [tokens, width].

  Raises:
    ValueError: another dtype or shape.
  """
  _check("sum_rows", places, y_MD=y_MD, weight_NK=weight_NK)
  return weighted_rows(y_MD, weight_NK, places.slot_NK)


def _sum_forward(y_MD, weight_NK, places):
  return sum_rows(y_MD, weight_NK, places), (y_MD, weight_NK, places)


def _sum_backward(residuals, dout_ND):
  y_MD, weight_NK, places = residuals
  return *sum_rows_backward(y_MD, weight_NK, *places, dout_ND), None


sum_rows.defvjp(_sum_forward, _sum_backward)


def gather_rows(x_ND: jax.Array, source_M: jax.Array) -> jax.Array:
  """`x[source]`, zero where `source` is no row of `x`; not differentiable."""
  _, width = expect("take_rows", "x", x_ND, (None, None), jnp.bfloat16)
  (slots,) = expect("take_rows", "source", source_M, (None,), jnp.int32)
  expect_packs("take_rows", width)
  return call("ats_take_rows", jax.ShapeDtypeStruct((slots, width), x_ND.dtype), x_ND, source_M)


def weighted_rows(y_MD: jax.Array, weight_NK: jax.Array, slot_NK: jax.Array) -> jax.Array:
  """`sum_rows`, not differentiable."""
  tokens, choices = expect("sum_rows", "slot", slot_NK, (None, None), jnp.int32)
  _, width = expect("sum_rows", "y", y_MD, (None, None), jnp.bfloat16)
  expect("sum_rows", "weight", weight_NK, (tokens, choices), jnp.float32)
  expect_packs("sum_rows", width)
  _expect_choices("sum_rows", choices)
  out = jax.ShapeDtypeStruct((tokens, width), y_MD.dtype)
  return call("ats_sum_rows", out, y_MD, weight_NK, slot_NK)


def add_rows(y_MD: jax.Array, slot_NK: jax.Array) -> jax.Array:
  """`sum_rows` with all weights 1."""
  tokens, choices = expect("add_rows", "slot", slot_NK, (None, None), jnp.int32)
  _, width = expect("add_rows", "y", y_MD, (None, None), jnp.bfloat16)
  expect_packs("add_rows", width)
  _expect_choices("add_rows", choices)
  return call("ats_add_rows", jax.ShapeDtypeStruct((tokens, width), y_MD.dtype), y_MD, slot_NK)


def sum_rows_backward(
  y_MD: jax.Array,
  weight_NK: jax.Array,
  source_M: jax.Array,
  choice_M: jax.Array,
  slot_NK: jax.Array,
  dout_ND: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `sum_rows` by `y_MD` (zero in empty slots) and `weight_NK`, in one pass."""
  places = Places(source_M, choice_M, slot_NK)
  _check("sum_rows_backward", places, x_ND=dout_ND, y_MD=y_MD, weight_NK=weight_NK)
  out = (like(y_MD), like(weight_NK))
  return call("ats_sum_rows_backward", out, dout_ND, y_MD, weight_NK, choice_M)


def _check(op, places, x_ND=None, y_MD=None, weight_NK=None) -> int:
  tokens, choices = expect(op, "places.slot_NK", places.slot_NK, (None, None), jnp.int32)
  (slots,) = expect(op, "places.source_M", places.source_M, (None,), jnp.int32)
  expect(op, "places.choice_M", places.choice_M, (slots,), jnp.int32)
  _expect_choices(op, choices)
  width = None
  if x_ND is not None:
    width = expect(op, "rows of tokens", x_ND, (tokens, None), jnp.bfloat16)[1]
  if y_MD is not None:
    width = expect(op, "rows of slots", y_MD, (slots, width), jnp.bfloat16)[1]
  if weight_NK is not None:
    expect(op, "weight", weight_NK, (tokens, choices), jnp.float32)
  assert width is not None
  expect_packs(op, width)
  return slots


def _expect_choices(op, choices):
  if not 1 <= choices <= MAX_CHOICES:
    raise ValueError(f"{op}: {choices} choices a token, expected 1 to {MAX_CHOICES}")
