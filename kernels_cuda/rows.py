"""Rows to the slots of their experts and back; gathers only, backward too.

Letters: N tokens, K choices of a token (1 to 8), M slots, D width. Rows are bfloat16, their width a
multiple of 8. `source_M` is the token in each slot (N = none), `choice_M` which choice n * K + k
(N * K = none), `slot_NK` the slot of each choice (M = none); all int32.
"""

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, expect_packs, like

MAX_CHOICES = 8


def take_rows(x_ND: jax.Array, source_M: jax.Array) -> jax.Array:
  """`out[m] = x[source[m]]`, zero in empty slots. Floor in bytes: 2 D (N + M) + 4 M.

  Raises:
    ValueError: another dtype or shape; so do all below.
  """
  width = _expect_rows("take_rows", "x", x_ND)
  (slots,) = expect("take_rows", "source", source_M, (None,), jnp.int32)
  return call("ats_take_rows", jax.ShapeDtypeStruct((slots, width), x_ND.dtype), x_ND, source_M)


def take_rows_backward(dout_MD: jax.Array, slot_NK: jax.Array) -> jax.Array:
  """`dx[n] = sum_k dout[slot[n, k]]`, added in float32. Floor as forward."""
  width = _expect_rows("take_rows_backward", "dout", dout_MD)
  tokens, _ = _expect_choices("take_rows_backward", slot_NK)
  out = jax.ShapeDtypeStruct((tokens, width), dout_MD.dtype)
  return call("ats_take_rows_backward", out, dout_MD, slot_NK)


def sum_rows(y_MD: jax.Array, weight_NK: jax.Array, slot_NK: jax.Array) -> jax.Array:
  """`out[n] = sum_k weight[n, k] * y[slot[n, k]]`, weights and sums in float32.

  A choice without a slot adds nothing. Floor in bytes: 2 D (M + N) + 8 N K.
  """
  width = _expect_rows("sum_rows", "y", y_MD)
  tokens, choices = _expect_choices("sum_rows", slot_NK)
  expect("sum_rows", "weight", weight_NK, (tokens, choices), jnp.float32)
  out = jax.ShapeDtypeStruct((tokens, width), y_MD.dtype)
  return call("ats_sum_rows", out, y_MD, weight_NK, slot_NK)


def sum_rows_backward(
  y_MD: jax.Array,
  weight_NK: jax.Array,
  source_M: jax.Array,
  choice_M: jax.Array,
  slot_NK: jax.Array,
  dout_ND: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `sum_rows` by `y_MD` (zero in empty slots) and `weight_NK`, in one pass.

  Floor in bytes: 2 D (2 M + N) + 12 N K. The kernel needs of the places `choice_M` only.
  """
  op = "sum_rows_backward"
  width, (slots, _) = _expect_rows(op, "y", y_MD), y_MD.shape
  tokens, choices = _expect_choices(op, slot_NK)
  expect(op, "source", source_M, (slots,), jnp.int32)
  expect(op, "choice", choice_M, (slots,), jnp.int32)
  expect(op, "weight", weight_NK, (tokens, choices), jnp.float32)
  expect(op, "dout", dout_ND, (tokens, width), jnp.bfloat16)
  out = (like(y_MD), like(weight_NK))
  return call("ats_sum_rows_backward", out, dout_ND, y_MD, weight_NK, choice_M)


def _expect_rows(op, name, x) -> int:
  _, width = expect(op, name, x, (None, None), jnp.bfloat16)
  expect_packs(op, width)
  return width


def _expect_choices(op, slot_NK) -> tuple[int, int]:
  tokens, choices = expect(op, "slot", slot_NK, (None, None), jnp.int32)
  if not 1 <= choices <= MAX_CHOICES:
    raise ValueError(f"{op}: {choices} choices a token, expected 1 to {MAX_CHOICES}")
  return tokens, choices
