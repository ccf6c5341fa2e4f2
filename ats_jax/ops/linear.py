"""Linear layers on sharded arrays, in the compute dtype or in 8 bits."""

import functools
import math
from collections.abc import Sequence

import jax

from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import (
  all_sum,
  einsum,
  ensure_sharding,
  island,
  num_shards,
  reshape,
)
from ats_jax.sharding.rules import current_plan
from ats_jax.sharding.shards import MatrixSharding, gather_shards

TOKEN_AXES = ("batch", "seq")


def linears(
  x: jax.Array,
  weights: Sequence[jax.Array],
  *,
  inputs: Sequence[str],
  outputs: Sequence[Sequence[str]],
  stored: Sequence[Sequence[str]] | None = None,
  fp8: bool = False,
  keep_gathered: bool = False,
  kernels: Kernels = XLA,
) -> tuple[jax.Array, ...]:
  """Multiply the last dimensions of `x` by each of several weights.

  Args:
    x: activations [batch, seq, *inputs].
    weights: each [*inputs, *outputs] in the dtype of `x`; sharded in any way.
    inputs: logical axes of the contracted dimensions, as `x` has them.
    outputs: for each weight, logical axes of the result's new dimensions.
    stored: for each weight the logical axes of its storage, for 8 bits and `Plan.copy_engines`. If
      they shard it further, it is gathered here, in 8 bits if `fp8`. None = gathered before.
    fp8: multiply in 8 bits (`fp8_matmuls`), each device with the scales of its own block.
    keep_gathered: keep the gathered weights for the backward pass.
    kernels: the chosen implementations.

  Returns:
    [batch, seq, *outputs] in the dtype of `x`, for each weight.

  Raises:
    ValueError: in 8 bits, for sizes on a device that are no multiples of 16.
  """
  if fp8 or current_plan().copy_engines:
    used = [(*inputs, *axes) for axes in outputs]
    stored = used if stored is None else stored
    cut = functools.partial(_matrix_sharding, num_inputs=len(inputs), keep_gathered=keep_gathered)
    cuts = tuple(map(cut, stored, used))
    of_device = functools.partial(_local, inputs=inputs, cuts=cuts, fp8=fp8, kernels=kernels)
    return island(
      of_device,
      in_axes=((*TOKEN_AXES, *inputs), *stored),
      out_axes=tuple((*TOKEN_AXES, *axes) for axes in outputs),
    )(x, *weights)
  # As matrices: XLA on a CPU transposes and copies operands that sum over several dimensions.
  # The tokens of a device are no block of a matrix where rows are cut along their positions.
  is_cut = num_shards("seq") > 1
  lead = x.shape[:2] if is_cut else (x.shape[0] * x.shape[1],)
  at_tokens = TOKEN_AXES[: len(lead)]
  formula = "BTK,KN->BTN" if is_cut else "TK,KN->TN"
  x_TK = reshape(x, (*lead, math.prod(x.shape[2:])), axes=(*at_tokens, inputs[0]))

  def product(weight, axes):
    if keep_gathered:  # as it is stored: XLA then finds that both passes ask for the same
      weight = ensure_sharding(weight, *inputs, *axes)
    weight_KN = weight.reshape(x_TK.shape[-1], -1)
    y_TN = einsum(formula, x_TK, weight_KN, axes=(*at_tokens, axes[0]))
    shape = (*x.shape[:2], *weight.shape[len(inputs) :])
    return reshape(y_TN, shape, axes=(*TOKEN_AXES, *axes))

  return tuple(map(product, weights, outputs))


def _matrix_sharding(stored, used, *, num_inputs, keep_gathered):
  """How a matrix [inputs, outputs] is sharded beyond its use; None = not."""
  for dim, (kept, axis) in enumerate(zip(stored, used, strict=True)):
    if kept != axis and num_shards(kept) > num_shards(axis):
      return MatrixSharding(kept, 0 if dim < num_inputs else 1, keep_gathered)
  return None


def _gather_and_multiply(x, shard, cut, num_inputs):
  x_TK, shard_KN = _matrix(x, 2), _matrix(shard, num_inputs)
  return x_TK @ (shard_KN if cut is None else gather_shards(shard_KN, cut.axis, cut.dim))


# Reverse mode keeps the arguments and gathers again. Where XLA sees both, it makes one of them.
_matmul = jax.custom_vjp(_gather_and_multiply, nondiff_argnums=(2, 3))
_matmul.defvjp(
  lambda x, shard, *static: (_gather_and_multiply(x, shard, *static), (x, shard)),
  lambda cut, num_inputs, args, dy_TN: jax.vjp(
    lambda x, shard: _gather_and_multiply(x, shard, cut, num_inputs), *args
  )[1](dy_TN),
)


def _matrix(x, num_rows):
  """Reshape `x` to a matrix: its first `num_rows` dimensions as one, the others as one."""
  return x.reshape(math.prod(x.shape[:num_rows]), -1)


def _local(x, *weights, inputs, cuts, fp8, kernels):
  """Multiply one device's block of `x` by each weight."""
  batch, seq = x.shape[:2]
  if fp8:
    from ats_jax.ops.fp8_matmul import fp8_matmuls

    matrices = [_matrix(weight, len(inputs)) for weight in weights]
    results = fp8_matmuls(_matrix(x, 2), matrices, kernels, cuts)
  else:
    times = lambda weight, cut: _matmul(x, weight, cut, len(inputs))
    results = tuple(map(times, weights, cuts))

  def whole(weight, cut):  # its outputs
    first, *rest = weight.shape[len(inputs) :]
    ways = num_shards(cut.axis) if cut is not None and cut.dim == 1 else 1
    return (batch, seq, first * ways, *rest)

  shapes = map(whole, weights, cuts)
  pairs = zip(results, shapes, strict=True)
  return tuple(all_sum(y_TN, inputs[0]).reshape(s) for y_TN, s in pairs)
