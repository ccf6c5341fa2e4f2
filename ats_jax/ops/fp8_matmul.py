"""Matmul of dense layers in 8 bits: one scale a tensor, sums in float32.

The two operands of the forward matmul are float8_e4m3fn (3 bits of mantissa, up to 448), gradients
are float8_e5m2 (2 bits, up to 57344). A scale is a power of two: dividing and multiplying by it is
exact, so only the cast itself rounds. On GPUs of compute capability 8.9 and later, XLA gives all
three matmuls to cuBLASLt in 8 bits; elsewhere they run widened, with the same operands. cuBLASLt
wants both operands of a product to lie along its contraction, so weights are transposed for the
forward one, and both activations and gradients for the weights' gradient (`ops.quantise`).

Letters: T tokens (any leading axes), K input width, N output width, H steps that are remembered.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import Precision

from ats_jax.ops.quantise import E4M3, E5M2, cast, cast_and_transpose, scale_of, transposed
from ats_jax.ops.registry import XLA, Slots

MULTIPLE = 16  # of every contracted and every output width: what cuBLASLt takes
AMAX = "fp8_amax"  # the largest values of a forward pass, for remat policies


class Amax(NamedTuple):
  """The largest absolute value of each tensor of a matmul, float32 scalars.

  Attributes:
    x: of the activations.
    w: of the weights.
    dy: of the gradient of the result.
  """

  x: jax.Array
  w: jax.Array
  dy: jax.Array


class History(NamedTuple):
  """What delayed scaling remembers of one matmul: float32 [H] for each tensor, newest first.

  Attributes:
    x: of the activations.
    w: of the weights.
    dy: of the gradient of the result.
  """

  x: jax.Array
  w: jax.Array
  dy: jax.Array

  @classmethod
  def empty(cls, length: int = 16) -> "History":
    """Nothing seen yet. The first step then runs with scales of one: it only takes measure."""
    return cls(*(jnp.zeros(length, jnp.float32) for _ in cls._fields))

  def amax(self) -> Amax:
    """The largest remembered, which is what to scale the next step by."""
    return Amax(*(jnp.max(a) for a in self))

  def push(self, seen: Amax) -> "History":
    """Remembers one more step, forgets the oldest. A step that was not finite is left out."""
    keep = lambda a, new: jnp.where(jnp.isfinite(new), jnp.roll(a, 1).at[0].set(new), a)
    return History(*(keep(a, new) for a, new in zip(self, seen, strict=True)))


def fp8_matmul(
  x_TK: jax.Array, w_KN: jax.Array, amax: Amax | None = None, slots: Slots = XLA
) -> jax.Array:
  """`x @ w` in 8 bits, forward and backward.

  Without `amax`, every tensor is scaled by its own largest value (current scaling): one more pass
  over it. With `amax`, by what earlier steps have shown (delayed scaling); then the *gradient* with
  respect to `amax` is what this step has seen, for `History.push`. Where gradients are added up
  over micro-batches, take the maximum for these instead.

  For local arrays, or where nothing is sharded: call it inside an island. There, every device has
  scales of its own.

  Args:
    x_TK: activations [..., K].
    w_KN: weights [K, N], same dtype.
    amax: for delayed scaling.
    slots: what runs.

  Returns:
    [..., N] in the dtype of `x_TK`.

  Raises:
    ValueError: a width or the number of rows is not a multiple of 16.
  """
  rows = math.prod(x_TK.shape[:-1])
  for what, size in (
    ("rows", rows),
    ("the input width", x_TK.shape[-1]),
    ("the output width", w_KN.shape[1]),
  ):
    if size % MULTIPLE:
      raise ValueError(
        f"fp8_matmul of {x_TK.shape} and {w_KN.shape}: {what}, {size}, must be a multiple of"
        f" {MULTIPLE}. Pad it, or multiply in bfloat16"
      )
  y_TN = _matmul(x_TK.reshape(rows, -1), w_KN, amax, slots)
  return y_TN.reshape(*x_TK.shape[:-1], w_KN.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(x_TK: jax.Array, w_KN: jax.Array, amax: Amax | None, slots: Slots) -> jax.Array:
  return _forward(x_TK, w_KN, amax, slots)[0]


def _forward(x_TK, w_KN, amax, slots):
  x_TK = _written(x_TK)
  # Named, so that a backward pass that makes the operands again need not look for it again.
  seen_x, seen_w = (checkpoint_name(_amax(a), AMAX) for a in (x_TK, w_KN))
  scale_x = scale_of(E4M3, seen_x if amax is None else amax.x)
  scale_w = scale_of(E4M3, seen_w if amax is None else amax.w)
  w8_NK = transposed(w_KN, scale_w, E4M3, slots)
  # Each product is exact; the tensor cores add them up with some 14 bits. The gradients, whose
  # sums are longer, ask for sums that are carried over to float32 now and then.
  y_TN = _product(cast(x_TK, scale_x, E4M3), w8_NK, x_TK.dtype, Precision.DEFAULT)
  # A second read of x, but under remat only one of the two is made in each pass.
  x8_KT, w8_KN = transposed(x_TK, scale_x, E4M3, slots), cast(w_KN, scale_w, E4M3)
  like_w = jnp.zeros(0, w_KN.dtype)
  residuals = (x8_KT, scale_x, w8_KN, scale_w, amax, seen_x, seen_w, like_w)
  return _scale(y_TN, scale_x * scale_w), residuals


def _backward(slots, residuals, dy_TN):
  x8_KT, scale_x, w8_KN, scale_w, amax, seen_x, seen_w, like_w = residuals
  dy_TN = _written(dy_TN)
  seen_dy = _amax(dy_TN)
  scale_dy = scale_of(E5M2, seen_dy if amax is None else amax.dy)
  dy8_TN, dy8_NT = cast_and_transpose(dy_TN, scale_dy, E5M2, slots)
  dx_TK = _product(dy8_TN, w8_KN, dy_TN.dtype, Precision.HIGHEST)
  dw_KN = _product(x8_KT, dy8_NT, like_w.dtype, Precision.HIGHEST)
  dx_TK, dw_KN = _scale(dx_TK, scale_dy * scale_w), _scale(dw_KN, scale_x * scale_dy)
  return dx_TK, dw_KN, None if amax is None else Amax(seen_x, seen_w, seen_dy)


_matmul.defvjp(_forward, _backward)


def _product(a_MC, b_NC, dtype, precision):
  """`a @ b.T`, contracting the last dimension of both."""
  return jax.lax.dot_general(
    a_MC, b_NC, (((1,), (1,)), ((), ())), precision, preferred_element_type=dtype
  )


def _scale(y, scale):
  return (y.astype(jnp.float32) * scale).astype(y.dtype)


def _written(x):
  """Kept from XLA, which would write what has two readers in the float32 that it was made in."""
  return jax.lax.optimization_barrier(x)


def _amax(x: jax.Array) -> jax.Array:
  return jnp.max(jnp.abs(x)).astype(jnp.float32)
