"""Linear layers on sharded arrays, in the compute dtype or in 8 bits."""

import math
from collections.abc import Sequence

import jax

from ats_jax.ops.fp8_matmul import fp8_matmuls
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import all_sum, einsum, island, num_shards, reshape


def linears(
  x: jax.Array,
  weights: Sequence[jax.Array],
  *,
  inputs: Sequence[str],
  outputs: Sequence[Sequence[str]],
  fp8: bool = False,
  kernels: Kernels = XLA,
) -> tuple[jax.Array, ...]:
  """Multiply the last dimensions of `x` by each of several weights.

  Args:
    x: activations [batch, seq, *inputs].
    weights: each [*inputs, *outputs] in the dtype of `x`; sharded in any way.
    inputs: logical axes of the contracted dimensions, as `x` has them.
    outputs: for each weight, logical axes of the result's new dimensions.
    fp8: multiply in 8 bits (`fp8_matmuls`), each device with the scales of its own block.
    kernels: what runs.

  Returns:
    [batch, seq, *outputs] in the dtype of `x`, for each weight.

  Raises:
    ValueError: in 8 bits, for sizes on a device that are no multiples of 16.
  """
  rows = ("batch", "seq")
  if not fp8:
    # As matrices: XLA on a CPU transposes and copies operands that sum over several dimensions.
    # The tokens of a device are no block of a matrix where rows are cut along their positions.
    is_cut = num_shards("seq") > 1
    tokens, lead = (rows, x.shape[:2]) if is_cut else (rows[:1], (x.shape[0] * x.shape[1],))
    x_TK = reshape(x, (*lead, math.prod(x.shape[2:])), axes=(*tokens, inputs[0]))
    formula = "BTK,KN->BTN" if is_cut else "TK,KN->TN"

    def times(weight, outputs):
      weight_KN = weight.reshape(x_TK.shape[-1], -1)
      y_TN = einsum(formula, x_TK, weight_KN, axes=(*tokens, outputs[0]))
      shape = (*x.shape[:2], *weight.shape[len(inputs) :])
      return reshape(y_TN, shape, axes=(*rows, *outputs))

    return tuple(map(times, weights, outputs))

  def local(x, *weights):
    batch, seq = x.shape[:2]
    flat_TK = x.reshape(batch * seq, -1)
    flat = [weight.reshape(flat_TK.shape[1], -1) for weight in weights]
    results = fp8_matmuls(flat_TK, flat, kernels)
    shapes = [(batch, seq, *weight.shape[len(inputs) :]) for weight in weights]
    return tuple(
      all_sum(y_TN, inputs[0]).reshape(s) for y_TN, s in zip(results, shapes, strict=True)
    )

  in_axes = ((*rows, *inputs), *((*inputs, *axes) for axes in outputs))
  return island(local, in_axes=in_axes, out_axes=tuple((*rows, *axes) for axes in outputs))(
    x, *weights
  )
