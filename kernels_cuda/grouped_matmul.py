"""One matmul for each group of consecutive rows, on the tensor cores of sm_80 and later.

Letters: M rows, E groups, D input width, F output width.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_cuda.checks import call, expect, expect_packs

BLOCK_N = (128, 256)  # columns of a result that a block computes, the default first


def grouped_matmul(
  x_MD: jax.Array,
  w_EDF: jax.Array,
  sizes_E: jax.Array,
  *,
  transpose_w: bool = False,
  block_n: int = BLOCK_N[0],
) -> jax.Array:
  """`y[m] = x[m] @ w[g(m)]`, added in float32; not differentiable.

  Args:
    x_MD: bfloat16 or float16 [rows, d_in], sorted by group; d_in a multiple of 8.
    w_EDF: same dtype, [groups, d_in, d_out], or [groups, d_out, d_in] if `transpose_w`; d_out a
      multiple of 8.
    sizes_E: int32 [groups]; their sum may be less than M.
    transpose_w: multiply by the transposed matrices, which are read in place.
    block_n: columns of a tile, 128 or 256.

  Returns:
    [rows, d_out] like `x_MD`; zero in rows past the last group.

  Raises:
    ValueError: another dtype, shape or tile.
  """
  op = "grouped_matmul"
  rows, d_in = expect(op, "x", x_MD, (None, None), jnp.bfloat16, jnp.float16)
  shape = (None, None, d_in) if transpose_w else (None, d_in, None)
  groups, *sides = expect(op, "w", w_EDF, shape, x_MD.dtype)
  d_out = sides[0 if transpose_w else 1]
  expect(op, "sizes", sizes_E, (groups,), jnp.int32)
  _check(op, d_in, d_out, block_n)
  out = jax.ShapeDtypeStruct((rows, d_out), x_MD.dtype)
  settings = {"transpose_w": np.bool_(transpose_w), "block_n": np.int64(block_n)}
  return call("ats_grouped_matmul", out, x_MD, w_EDF, sizes_E, **settings)


def grouped_matmul_dx(
  gradients: Sequence[jax.Array],
  weights: Sequence[jax.Array],
  sizes_E: jax.Array,
  *,
  block_n: int = BLOCK_N[0],
) -> jax.Array:
  """The sum over pairs of `dy[m] @ w[g(m)]^T`, a kernel each; otherwise as `grouped_matmul`."""
  pairs = zip(gradients, weights, strict=True)
  run = functools.partial(grouped_matmul, transpose_w=True, block_n=block_n)
  return functools.reduce(operator.add, [run(dy_MF, w, sizes_E) for dy_MF, w in pairs])


def grouped_matmul_dw(
  x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, *, block_n: int = BLOCK_N[0]
) -> jax.Array:
  """`dw[e] = x[rows of e]^T @ dy[rows of e]`, added in float32; not differentiable.

  Args:
    x_MD: bfloat16 or float16 [rows, d_in], sorted by group; d_in a multiple of 8.
    dy_MF: same dtype, [rows, d_out]; d_out a multiple of 8.
    sizes_E: int32 [groups]; rows past their sum are not read.
    block_n: columns of a tile, 128 or 256.

  Returns:
    [groups, d_in, d_out] like `x_MD`; zero for an empty group.

  Raises:
    ValueError: another dtype, shape or tile.
  """
  op = "grouped_matmul_dw"
  rows, d_in = expect(op, "x", x_MD, (None, None), jnp.bfloat16, jnp.float16)
  _, d_out = expect(op, "dy", dy_MF, (rows, None), x_MD.dtype)
  (groups,) = expect(op, "sizes", sizes_E, (None,), jnp.int32)
  _check(op, d_in, d_out, block_n)
  out = jax.ShapeDtypeStruct((groups, d_in, d_out), x_MD.dtype)
  return call("ats_grouped_matmul_dw", out, x_MD, dy_MF, sizes_E, block_n=np.int64(block_n))


def _check(op, d_in, d_out, block_n):
  expect_packs(op, d_in)
  expect_packs(op, d_out)
  if block_n not in BLOCK_N:
    raise ValueError(f"{op}: block_n is {block_n}, expected 128 or 256")
