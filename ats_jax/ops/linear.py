"""A linear layer on sharded arrays, in the compute dtype or in 8 bits."""

import math
from collections.abc import Sequence

import jax

from ats_jax.ops.fp8_matmul import MULTIPLE, fp8_matmul
from ats_jax.ops.registry import XLA, Slots
from ats_jax.sharding.apply import all_sum, einsum, island, reshape


def linear(
  x: jax.Array,
  weight: jax.Array,
  *,
  inputs: Sequence[str],
  outputs: Sequence[str],
  fp8: bool = False,
  slots: Slots = XLA,
) -> jax.Array:
  """Multiply the last dimensions of `x` by `weight`.

  Args:
    x: activations [batch, seq, *inputs].
    weight: [*inputs, *outputs] in the dtype of `x`; sharded in any way.
    inputs: logical axes of the contracted dimensions, as `x` has them.
    outputs: logical axes of the result's new dimensions.
    fp8: multiply in 8 bits (`fp8_matmul`), each device with the scales of its own block. A number
      of rows on a device that 8 bits cannot take, as in generation token by token, is multiplied
      in the dtype of `x`.
    slots: what runs.

  Returns:
    [batch, seq, *outputs] in the dtype of `x`.
  """
  rows, shape = ("batch", "seq"), weight.shape[len(inputs) :]
  if not fp8:
    # As matrices: where it sums over several dimensions, XLA on a CPU copies operands, transposed.
    x_TK = reshape(x, (x.shape[0] * x.shape[1], math.prod(x.shape[2:])), axes=("batch", inputs[0]))
    weight_KN = weight.reshape(x_TK.shape[1], -1)
    y_TN = einsum("TK,KN->TN", x_TK, weight_KN, axes=("batch", outputs[0]))
    return reshape(y_TN, (*x.shape[:2], *shape), axes=(*rows, *outputs))

  def local(x, weight):
    batch, seq, shape = *x.shape[:2], weight.shape[len(inputs) :]
    flat_TK = x.reshape(batch * seq, -1)
    flat_KN = weight.reshape(flat_TK.shape[1], math.prod(shape))
    y_TN = (
      flat_TK @ flat_KN if batch * seq % MULTIPLE else fp8_matmul(flat_TK, flat_KN, slots=slots)
    )
    return all_sum(y_TN, inputs[0]).reshape(batch, seq, *shape)

  return island(local, in_axes=((*rows, *inputs), (*inputs, *outputs)), out_axes=(*rows, *outputs))(
    x, weight
  )
