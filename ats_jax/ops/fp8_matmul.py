"""Matmul of dense layers in 8 bits: one scale a tensor, sums in float32.

The two operands of the forward matmul are float8_e4m3fn (3 bits of mantissa, up to 448), gradients
are float8_e5m2 (2 bits, up to 57344). A scale is a power of two: dividing and multiplying by it is
exact, so only the cast itself rounds. On GPUs of compute capability 8.9 and later, XLA gives all
three matmuls to cuBLASLt in 8 bits; elsewhere they run widened, with the same operands. cuBLASLt
wants both operands of a product to lie along its contraction, so weights are transposed for the
forward one, and both activations and gradients for the weights' gradient (`ops.quantise`).

Letters: T tokens (any leading axes), K input width, N output width.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import Precision

from ats_jax.ops.quantise import E4M3, E5M2, cast, cast_and_transpose, cast_transposed, scale_of
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.ops.remat import FP8_MAXIMA
from ats_jax.sharding.apply import all_max, num_shards
from ats_jax.sharding.shards import MatrixSharding, gather_shards, reduce_scatter_shards

MULTIPLE = 16  # of every contracted and every output width: what cuBLASLt takes


def fp8_matmuls(
  x_TK: jax.Array,
  weights: Sequence[jax.Array],
  kernels: Kernels = XLA,
  cuts: Sequence[MatrixSharding | None] | None = None,
) -> tuple[jax.Array, ...]:
  """`x @ w` in 8 bits, forward and backward, for several weights, such as those of q, k and v.

  Every tensor is scaled by its own largest value. The 8-bit operands that are made of the
  activations serve all weights.

  For local arrays, or where nothing is sharded: call it inside an island. There, every device has
  scales of its own; the devices that share a matrix have one scale of it, and send each other their
  parts in 8 bits. The sum of their gradients is scattered in the dtype of the weights.

  Args:
    x_TK: activations [..., K].
    weights: each [K, N] with its own N, same dtype; of a sharded weight this device's shard.
    kernels: the chosen implementations.
    cuts: for each weight how it is sharded; None = not sharded.

  Returns:
    [..., N] in the dtype of `x_TK`, for each of the weights.

  Raises:
    ValueError: a width or the number of rows is not a multiple of 16.
  """
  rows, width = math.prod(x_TK.shape[:-1]), x_TK.shape[-1]
  cuts = (None,) * len(weights) if cuts is None else tuple(cuts)
  for w_KN, cut in zip(weights, cuts, strict=True):
    ways = num_shards(cut.axis) if cut is not None and cut.dim == 1 else 1
    for what, size in (
      ("rows", rows),
      ("the input width", width),
      ("the output width", w_KN.shape[1] * ways),
    ):
      if size % MULTIPLE:
        raise ValueError(
          f"fp8_matmul of {x_TK.shape} and {w_KN.shape}: {what}, {size}, must be a multiple of"
          f" {MULTIPLE}. Pad it, or multiply in bfloat16"
        )
  results = _matmuls(x_TK.reshape(rows, width), tuple(weights), kernels, cuts)
  return tuple(y_RN.reshape(*x_TK.shape[:-1], -1) for y_RN in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmuls(x_TK, weights, kernels, cuts):
  return _forward(x_TK, weights, kernels, cuts)[0]


def _forward(x_TK, weights, kernels, cuts):
  x_TK = _materialise(x_TK)
  # Named, so that a backward pass that recomputes the operands need not recompute the scale.
  named = lambda amax: checkpoint_name(amax, FP8_MAXIMA)

  def of_all(w_KN, cut):
    if cut is None:
      return named(_amax(w_KN))
    amax = all_max(_amax(w_KN), cut.axis)
    # What has a name is behind a barrier: XLA would not find that both passes gather the same.
    return amax if cut.keep_gathered else named(amax)

  largest = [named(_amax(x_TK)), *map(of_all, weights, cuts)]
  scale_x, *scales_w = (scale_of(E4M3, a) for a in largest)
  x8s_TK = _apart(cast(x_TK, scale_x, E4M3), len(weights))

  def times(x8_TK, w_KN, scale_w, cut):
    if cut is None:
      w8_NK = cast_transposed(w_KN, scale_w, E4M3, kernels)
    else:
      w8_NK = _gather_8_bits(cast(w_KN, scale_w, E4M3), cut).T
    # Each product is exact; the tensor cores accumulate with some 14 bits. Gradients have longer
    # sums, and ask for accumulators that are carried over to float32 now and then.
    return _matmul_transposed(x8_TK, scale_x, w8_NK, scale_w, x_TK.dtype, Precision.DEFAULT)

  results = tuple(map(times, x8s_TK, weights, scales_w, cuts))
  # This reads x a second time, but under remat each pass makes only one of the two casts.
  x8_KT = cast_transposed(x_TK, scale_x, E4M3, kernels)
  cast8 = lambda w_KN, scale_w, cut: _gather_8_bits(cast(w_KN, scale_w, E4M3), cut)
  weights8 = tuple(map(cast8, weights, scales_w, cuts))
  like_w = tuple(jnp.zeros(0, w_KN.dtype) for w_KN in weights)
  return results, (x8_KT, scale_x, weights8, scales_w, like_w)


def _backward(kernels, cuts, residuals, gradients):
  x8_KT, scale_x, weights8, scales_w, like_w = residuals
  gradients = [_materialise(dy_TN) for dy_TN in gradients]
  scales_dy = [scale_of(E5M2, _amax(dy_TN)) for dy_TN in gradients]
  x8s_KT = _apart(x8_KT, len(gradients))

  def through(dy_TN, scale_dy, x8_KT, w8_KN, scale_w, like, cut):
    is_frozen = like is None
    if is_frozen:
      dy8_TN, dy8_NT = cast(dy_TN, scale_dy, E5M2), None
    else:
      dy8_TN, dy8_NT = cast_and_transpose(dy_TN, scale_dy, E5M2, kernels)
    multiply = functools.partial(_matmul_transposed, precision=Precision.HIGHEST)
    dx_TK = multiply(dy8_TN, scale_dy, w8_KN, scale_w, dy_TN.dtype)
    if is_frozen:
      return dx_TK, None
    # Rounded before devices add theirs up, whatever XLA would fuse it with.
    dw_KN = _materialise(multiply(x8_KT, scale_x, dy8_NT, scale_dy, like.dtype))
    if cut is not None:
      dw_KN = reduce_scatter_shards(dw_KN, cut.axis, cut.dim)
    return dx_TK, dw_KN

  parts, dweights = zip(
    *map(through, gradients, scales_dy, x8s_KT, weights8, scales_w, like_w, cuts), strict=True
  )
  # Each sum but the first term is then made by the matmul of the next one.
  dx_TK = functools.reduce(lambda total, part: _materialise(total) + part, parts)
  return dx_TK, dweights


def _forward_rule(x_TK, weights, kernels, cuts):
  """As `_forward`, of arguments that tell whether anything is differentiated by them."""
  values = tuple(w_KN.value for w_KN in weights)
  results, (*residuals, like_w) = _forward(x_TK.value, values, kernels, cuts)
  pairs = zip(like_w, weights, strict=True)
  return results, (*residuals, tuple(like if w_KN.perturbed else None for like, w_KN in pairs))


_matmuls.defvjp(_forward_rule, _backward, symbolic_zeros=True)


def _gather_8_bits(w8: jax.Array, cut: MatrixSharding | None) -> jax.Array:
  """Gather the shards of all devices, sent as bytes, as not every collective takes 8-bit floats."""
  if cut is None:
    return w8
  parts = jax.lax.bitcast_convert_type(w8, jnp.uint8)
  return jax.lax.bitcast_convert_type(gather_shards(parts, cut.axis, cut.dim), w8.dtype)


def _matmul_transposed(a8_MC, scale_a, b8_NC, scale_b, dtype, precision):
  """`scale_a a8 @ (scale_b b8).T`, contracting the last dimension of both.

  XLA recognises operands that are scaled, and hands the scales to cuBLASLt.
  """
  wide = lambda x8, scale: x8.astype(dtype) * scale.astype(dtype)
  dims = (((1,), (1,)), ((), ()))
  return jax.lax.dot_general(wide(a8_MC, scale_a), wide(b8_NC, scale_b), dims, precision, dtype)


def _apart(x8: jax.Array, number: int) -> list[jax.Array]:
  """`x8` for each of several matmuls, each time hidden once more.

  XLA would make one matmul of those that share an operand, and would not multiply that in 8 bits.
  """
  hidden = itertools.accumulate(range(1, number), lambda x, _: _materialise(x), initial=x8)
  return list(hidden)


def _materialise(x):
  """Hide `x` from XLA, which writes an array with two readers in float32, as it was computed."""
  return jax.lax.optimization_barrier(x)


def _amax(x: jax.Array) -> jax.Array:
  return jnp.max(jnp.abs(x)).astype(jnp.float32)
