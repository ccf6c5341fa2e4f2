"""Linear layers on sharded arrays, in the compute dtype or in 8 bits."""

import functools
import math
from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops.registry import XLA, Kernels
from ats_jax.ops.remat import SCATTERED_SUM
from ats_jax.sharding.apply import (
  all_sum,
  einsum,
  einsum_reduce_scatter,
  ensure_sharding,
  gather_positions,
  island,
  num_shards,
  reduce_scatter,
  reshape,
  seq_axis,
)
from ats_jax.sharding.rules import current_plan
from ats_jax.sharding.shards import MatrixSharding, gather_shards

SUB_LAYER_ENTRY = (
  "residual_seq",
  "seq",
)  # axes of positions before and after the entry of a sub-layer


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

  Where the residual stream is cut along its positions by the axes of a sub-layer's width, they are
  gathered on the way in, for each pass anew, and scattered with the sum on the way out.

  Args:
    x: activations [batch, seq, *inputs], positions cut as `seq_axis` of the inputs.
    weights: each [*inputs, *outputs] in the dtype of `x`; sharded in any way.
    inputs: logical axes of the contracted dimensions, as `x` has them.
    outputs: for each weight, logical axes of the result's new dimensions, whose first ones have
      one `seq_axis`.
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
  of_x, of_y = seq_axis(inputs[0]), seq_axis(outputs[0][0])
  gathers, scatters = (of_x, of_y) == SUB_LAYER_ENTRY, (of_y, of_x) == SUB_LAYER_ENTRY
  at_x, at_y, inside = (("batch", seq) for seq in (of_x, of_y, "seq" if gathers else of_x))
  if fp8 or current_plan().copy_engines:
    used = [(*inputs, *axes) for axes in outputs]
    stored = used if stored is None else stored
    cut = functools.partial(_matrix_sharding, num_inputs=len(inputs), keep_gathered=keep_gathered)
    cuts = tuple(map(cut, stored, used))
    of_device = functools.partial(
      _local, inputs=inputs, cuts=cuts, scatters=scatters, fp8=fp8, kernels=kernels
    )
    products = island(
      of_device,
      in_axes=((*inside, *inputs), *stored),
      out_axes=tuple((*at_y, *axes) for axes in outputs),
    )
  else:
    # As matrices: XLA on a CPU transposes and copies operands that sum over several dimensions.
    # The tokens of a device are no block of a matrix where rows are cut along their positions.
    is_cut = of_x != of_y or num_shards(of_x) > 1
    lead = x.shape[:2] if is_cut else (x.shape[0] * x.shape[1],)
    tokens = len(lead)  # dimensions
    formula = "BTK,KN->BTN" if is_cut else "TK,KN->TN"
    times = einsum_reduce_scatter if scatters else einsum

    def products(x, *weights):
      x_TK = reshape(x, (*lead, math.prod(x.shape[2:])), axes=(*at_x[:tokens], inputs[0]))
      if gathers:
        x_TK = gather_positions(x_TK, *inside, inputs[0])

      def product(weight, axes):
        if keep_gathered:  # as it is stored: XLA then finds that both passes ask for the same
          weight = ensure_sharding(weight, *inputs, *axes)
        weight_KN = weight.reshape(x_TK.shape[-1], -1)
        y_TN = times(formula, x_TK, weight_KN, axes=(*at_y[:tokens], axes[0]))
        if scatters:  # or the shares of the sum would be kept
          y_TN = checkpoint_name(y_TN, SCATTERED_SUM)
        shape = (*x.shape[:2], *weight.shape[len(inputs) :])
        return reshape(y_TN, shape, axes=(*at_y, *axes))

      return tuple(map(product, weights, outputs))

  return (_gather_again_in_backward(products) if gathers else products)(x, *weights)


def _gather_again_in_backward(products):
  """Wrap `products` so that the backward pass keeps the arguments and gathers `x` again.

  `jax.checkpoint` would put a barrier around weights too, so that these are gathered twice; with
  one around `x` alone it fails under a policy that keeps products (jax 0.12.0.1).
  """
  f = jax.custom_vjp(products)

  def backward(args, dy):
    x, *weights = args
    # Or XLA would find that it has gathered `x` before, and keep that.
    x, dy = jax.lax.optimization_barrier((x, dy))
    return jax.vjp(products, x, *weights)[1](dy)

  f.defvjp(lambda *args: (products(*args), args), backward)
  return f


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


def _local(x, *weights, inputs, cuts, scatters, fp8, kernels):
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
  if scatters:
    return tuple(reduce_scatter(y_TN.reshape(s), inputs[0], dim=1) for y_TN, s in pairs)
  return tuple(all_sum(y_TN, inputs[0]).reshape(s) for y_TN, s in pairs)
