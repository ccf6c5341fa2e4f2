"""Matmul of dense layers in 8 bits: one scale a tensor, sums in float32.

The two operands of the forward matmul are float8_e4m3fn (3 bits of mantissa, up to 448), gradients
are float8_e5m2 (2 bits, up to 57344). A scale is a power of two: dividing and multiplying by it is
exact, so only the cast itself rounds. On GPUs of compute capability 8.9 and later, XLA gives all
three matmuls to cuBLASLt in 8 bits; elsewhere they run widened, with the same operands.

Letters: T tokens (any leading axes), K input width, N output width, H steps that are remembered.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MULTIPLE = 16  # of every contracted and every output width: what cuBLASLt takes
MAX_EXPONENT = 60  # of a scale, so that the product of two is a normal float32


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


def quantise(x: jax.Array, dtype: Any, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Casts to 8 bits after dividing by a power of two, so that `amax` is just within range.

  What is larger than the range saturates; what is not finite becomes NaN.

  Args:
    x: any floating-point array.
    dtype: float8_e4m3fn or float8_e5m2.
    amax: float32 scalar.

  Returns:
    The 8-bit array and the float32 scale: `x` is about their product.
  """
  largest = float(jnp.finfo(dtype).max)
  _, exponent = jnp.frexp(amax / largest)
  exponent = jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT)
  scaled = x.astype(jnp.float32) * jnp.ldexp(jnp.float32(1), -exponent)
  scaled = jnp.where(jnp.isfinite(scaled), jnp.clip(scaled, -largest, largest), jnp.nan)
  return scaled.astype(dtype), jnp.ldexp(jnp.float32(1), exponent)


def fp8_matmul(x_TK: jax.Array, w_KN: jax.Array, amax: Amax | None = None) -> jax.Array:
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

  Returns:
    [..., N] in the dtype of `x_TK`.

  Raises:
    ValueError: a width or the number of rows is not a multiple of 16.
  """
  for what, size in (
    ("rows", math.prod(x_TK.shape[:-1])),
    ("the input width", x_TK.shape[-1]),
    ("the output width", w_KN.shape[1]),
  ):
    if size % MULTIPLE:
      raise ValueError(
        f"fp8_matmul of {x_TK.shape} and {w_KN.shape}: {what}, {size}, must be a multiple of"
        f" {MULTIPLE}. Pad it, or multiply in bfloat16"
      )
  return _matmul(x_TK, w_KN, amax)


def _value(x_TK: jax.Array, w_KN: jax.Array, amax: Amax | None) -> jax.Array:
  return _forward(x_TK, w_KN, amax)[0]


def _forward(x_TK: jax.Array, w_KN: jax.Array, amax: Amax | None) -> tuple[jax.Array, tuple]:
  x_TK = _written(x_TK)
  seen_x, seen_w = _amax(x_TK), _amax(w_KN)
  x8_TK, scale_x = quantise(x_TK, E4M3, seen_x if amax is None else amax.x)
  w8_KN, scale_w = quantise(w_KN, E4M3, seen_w if amax is None else amax.w)
  contract = (((x_TK.ndim - 1,), (0,)), ((), ()))
  # Each product is exact; the tensor cores add them up with some 14 bits. The gradients, whose
  # sums are longer, ask for sums that are carried over to float32 now and then.
  y_TN = _dot(x8_TK, w8_KN, contract, x_TK.dtype, Precision.DEFAULT)
  like_w = jnp.zeros(0, w_KN.dtype)
  residuals = (x8_TK, scale_x, w8_KN, scale_w, amax, seen_x, seen_w, like_w)
  return _scale(y_TN, scale_x * scale_w), residuals


def _backward(residuals, dy_TN):
  x8_TK, scale_x, w8_KN, scale_w, amax, seen_x, seen_w, like_w = residuals
  dy_TN = _written(dy_TN)
  seen_dy = _amax(dy_TN)
  dy8_TN, scale_dy = quantise(dy_TN, E5M2, seen_dy if amax is None else amax.dy)
  last, leading = dy_TN.ndim - 1, tuple(range(dy_TN.ndim - 1))
  dx_TK = _dot(dy8_TN, w8_KN, (((last,), (1,)), ((), ())), dy_TN.dtype, Precision.HIGHEST)
  dw_KN = _dot(x8_TK, dy8_TN, ((leading, leading), ((), ())), like_w.dtype, Precision.HIGHEST)
  dx_TK, dw_KN = _scale(dx_TK, scale_dy * scale_w), _scale(dw_KN, scale_x * scale_dy)
  return dx_TK, dw_KN, None if amax is None else Amax(seen_x, seen_w, seen_dy)


_matmul = jax.custom_vjp(_value)
_matmul.defvjp(_forward, _backward)


def _dot(a, b, dimensions, dtype, precision):
  return jax.lax.dot_general(a, b, dimensions, precision, preferred_element_type=dtype)


def _scale(y, scale):
  return (y.astype(jnp.float32) * scale).astype(y.dtype)


def _written(x):
  """Kept from XLA, which would write what has two readers in the float32 that it was made in."""
  return jax.lax.optimization_barrier(x)


def _amax(x: jax.Array) -> jax.Array:
  return jnp.max(jnp.abs(x)).astype(jnp.float32)
