"""All-reduce over replicas in 8 bits, with error feedback.

Letters: R replicas, N blocks of BLOCK values each that a device owns the sum of, K values of a
block.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import all_gather, all_to_all, axis_index, num_shards

BLOCK = 256  # values that share a scale; the scales add 1.6 % to what is sent
SCALE_BYTES = 4
# Steps in proportion to a value: Adam divides each value by its own usual size, and equal steps (as
# of int8) drown the small values of a block; error feedback then sends them in bursts
# (docs/lab/log.md).
FORMAT = jnp.float8_e4m3fn
FORMAT_MAX = float(jnp.finfo(FORMAT).max)


class Quantised(NamedTuple):
  """Blocks of values in 8 bits with a scale for each.

  Attributes:
    bits: int8 [..., BLOCK], the bits of `FORMAT`: whatever sends them need not know that.
    scales: float32 [...]; NaN of a block with a value that is not finite.
  """

  bits: jax.Array
  scales: jax.Array


def quantise(x_NK: jax.Array) -> Quantised:
  """Round each value to `FORMAT`, whose largest value becomes that of the block.

  Scales by block keep one large value from rounding all others to zero (Dettmers et al. 2022,
  arXiv:2110.02861, section 2.1). A value is off by a sixteenth at most, or by half of the least
  step, 1 / 458,752 of the block's largest. What is not finite stays visible: all of its block
  becomes NaN.

  Args:
    x_NK: float32 [..., BLOCK].
  """
  scales_N = jnp.max(jnp.abs(x_NK), axis=-1) / FORMAT_MAX
  is_finite_N = jnp.all(jnp.isfinite(x_NK), axis=-1)
  is_usable_N = is_finite_N & (scales_N > 0.0)
  scaled_NK = x_NK / jnp.where(is_usable_N, scales_N, 1.0)[..., None]
  rounded_NK = jnp.where(is_usable_N[..., None], scaled_NK, 0.0).astype(FORMAT)
  bits_NK = jax.lax.bitcast_convert_type(rounded_NK, jnp.int8)
  return Quantised(bits_NK, jnp.where(is_finite_N, scales_N, jnp.nan))


def dequantise(q: Quantised) -> jax.Array:
  """Convert quantised blocks back to float32 [..., BLOCK]."""
  rounded_NK = jax.lax.bitcast_convert_type(q.bits, FORMAT)
  return rounded_NK.astype(jnp.float32) * q.scales[..., None]


def sum_over_replicas(parts: jax.Array, unsent: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
  """Sum over replicas, bit-identical on all of them, and return the part not yet sent.

  Each replica adds to its part what it has not sent before (error feedback: Seide et al. 2014,
  "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, arXiv:1901.09847), and sends each
  other one a share in 8 bits: an all-to-all, so that each value is rounded once before it is summed
  (Wang et al. 2023, arXiv:2306.10209). Each sums its share in float32 and sends that
  to all, in 8 bits again (Tang et al. 2019, arXiv:1905.05957). The error of either rounding stays
  unsent with the replica that made it. So over steps, all sums and what is unsent at the end add up
  to all parts.

  Args:
    parts: [..., replicas, ...], floating; dimension `dim` is sharded over replicas, the others in
      any way.
    unsent: like `parts`, in a dtype of its own. Zeros at the beginning.
    dim: the dimension of replicas.

  Returns:
    The sum, without the dimension, and the new `unsent`; dtypes as given.
  """
  cut = jax.typeof(parts).sharding.spec
  of_sum = jax.P(*cut[:dim], *cut[dim + 1 :])
  local = lambda parts, unsent: _local_sum(parts, unsent, dim)
  # Over all axes: where others are left to XLA, it gathers along them before an all-to-all.
  run = jax.shard_map(local, in_specs=(cut, cut), out_specs=(of_sum, cut), check_vma=False)
  return run(parts, unsent)


def sent_bytes(size: int) -> int:
  """The bytes to send for `size` values in 8 bits, scales included."""
  return size + math.ceil(size / BLOCK) * SCALE_BYTES


def _local_sum(part, unsent, dim):
  replicas, shape = num_shards("replica"), part.shape
  whole = (part.astype(jnp.float32) + unsent.astype(jnp.float32)).reshape(-1)
  padded = jnp.pad(whole, (0, -whole.size % (replicas * BLOCK)))  # to whole blocks for each
  own_RNK = padded.reshape(replicas, -1, BLOCK)
  q = quantise(own_RNK)
  rest_RNK = own_RNK - dequantise(q)
  arrived = Quantised(*(all_to_all(a, "replica") for a in q))
  total_NK = jnp.sum(dequantise(arrived), axis=0)
  q_sum = quantise(total_NK)
  here = axis_index("replica")
  rest_NK = jax.lax.dynamic_index_in_dim(rest_RNK, here, keepdims=False)
  rest_NK += total_NK - dequantise(q_sum)
  rest_RNK = jax.lax.dynamic_update_index_in_dim(rest_RNK, rest_NK, here, axis=0)
  total = dequantise(Quantised(*(all_gather(a, "replica") for a in q_sum)))
  like_part = lambda a: a.reshape(-1)[: whole.size].reshape(shape)
  summed = jnp.squeeze(like_part(total), dim).astype(part.dtype)
  return summed, like_part(rest_RNK).astype(unsent.dtype)
